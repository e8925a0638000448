"""Damages each file, and each kind of key in each file, of a checkpoint of every format that `convert` reads. The
conversion is refused with one sentence that names the checkpoint's file, or its result is the result of the undamaged
checkpoint."""

import copy
import io
import json
import os
import pickle
import re
import shutil
from collections.abc import Callable, Iterator
from enum import Enum
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import TensorProperties

from shardwright.config import load
from shardwright.conversion.formats import convert, read_state
from shardwright.conversion.state import TrainingState
from shardwright.system.errors import InputError
from tests.conversion import torchtitan_loop
from tests.conversion.test_convert import contents, write_again
from tests.conversion.zero_files import random_values, under_their_names, write_zero
from tests.marks import rest_prove

FORMATS = ("zero2", "zero3", "deepspeed-universal", "megatron", "torchtitan", "dcp", "hf")
QUICK = ("zero2", 97)
DELETED = object()
OTHERS: tuple[Any, ...] = (
    DELETED, None, "x", [], {}, True, -1, float("nan"), float("inf"), 1e400, 10**30, torch.zeros(2, 2), ["x"],
)  # fmt: skip
"""Values that are put in the place of a value."""
Damage = tuple[str, Callable[[Path], None]]


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """A folder with a checkpoint of each format, each of the same state, and the content of the state."""
    folder = tmp_path_factory.mktemp("damage")
    run_file = folder / "run.toml"
    (folder / "tokens").mkdir()
    rest = torchtitan_loop.RUN_FILE.replace("fp64", "fp32")
    run_file.write_text(f'out = "{folder / "out"}"\ndata = {{ path = "{folder / "tokens"}" }}\n{rest}')
    values = random_values(load(run_file).model.spec())
    write_zero(folder / "zero2", values, 2, 2)
    write_zero(folder / "zero3", values, 3, 2)
    for to in FORMATS[2:]:
        convert(folder / "zero2", folder / to, to, run=run_file)
    expected = content_of(read_state(folder / "dcp"))
    for name in FORMATS[:-1]:
        assert is_same(content_of(read_state(folder / name, str(folder / "hf"))), expected), name
    return folder, expected


def content_of(state: TrainingState) -> dict[str, Any]:
    """Every tensor and setting of a state."""
    tensors = {
        f"{kind} {name}": each.read(name, (0,) * len(shape), shape)
        for kind, each in ({"weight": state.weights} | dict(state.moments)).items()
        for name, shape in each.shapes.items()
    }
    return tensors | {"step": state.step, "settings": dict(state.settings), "samples": state.samples}


def is_same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return one.keys() == other.keys() and all(
        torch.equal(value, other[name]) if isinstance(value, Tensor) else value == other[name]
        for name, value in one.items()
    )


def put(path: Path, data: bytes) -> None:
    """Replace a file, which may be a hard link."""
    path.unlink()
    path.write_bytes(data)


def damages_of_files(source: Path) -> Iterator[Damage]:
    """Each file of a checkpoint deleted, cut, a folder, a link out, and with inverted bytes in several places."""
    for path in sorted(each for each in source.rglob("*") if each.is_file()):
        name, data = str(path.relative_to(source)), path.read_bytes()
        if name == "README.md" or (name == "generation_config.json"):
            continue
        yield f"{name} deleted", lambda at, name=name: (at / name).unlink()
        yield f"{name} a folder", lambda at, name=name: ((at / name).unlink(), (at / name).mkdir())
        yield f"{name} a link out", lambda at, name=name: ((at / name).unlink(), (at / name).symlink_to("/etc/passwd"))
        for n in (0, len(data) // 2, len(data) - 1):
            yield f"{name} cut to {n}", lambda at, name=name, cut=data[:n]: put(at / name, cut)
        for n in range(9) if not name.endswith((".safetensors", ".json")) else ():
            begin, width = n * len(data) // 9, (1, 8, 64)[n % 3]
            flipped = bytes(255 - each for each in data[begin : begin + width])
            changed = data[:begin] + flipped + data[begin + width :]
            yield f"{name} flipped at {begin}", lambda at, name=name, changed=changed: put(at / name, changed)


def paths_in(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """Yield the keys of each value in a nested value, and the value."""
    yield path, value
    if isinstance(value, dict):
        inner = [*value.items()]
    elif isinstance(value, list | tuple):
        inner = [*enumerate(value)]
    else:  # the others have states of their own
        is_plain = not isinstance(value, Tensor | Enum | Path | type | TensorProperties)
        inner = [*vars(value).items()] if is_plain and hasattr(value, "__dict__") else []
    for key, each in inner:
        yield from paths_in(each, (*path, key))


def with_value(value: Any, path: tuple[Any, ...], other: Any) -> Any:
    """Return a copy of a nested value with another value at `path`."""
    if not path:
        return other
    key, *rest = path
    changed = copy.copy(value)
    if isinstance(changed, tuple):
        items = [*changed]
        items[key : key + 1] = [] if other is DELETED and not rest else [with_value(changed[key], tuple(rest), other)]
        return tuple(items)
    table = changed if isinstance(changed, dict | list) else changed.__dict__
    if other is DELETED and not rest:
        del table[key]
    else:
        table[key] = with_value(table[key], tuple(rest), other)
    return changed


def one_of_a_kind(paths: Iterator[tuple[tuple[Any, ...], Any]]) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """Leave out values whose keys differ from an earlier one's only in numbers and names of parameters."""
    seen = set()
    for path, value in paths:
        kind = tuple(0 if isinstance(key, int) else re.sub(r".*\.weight.*", "NAME", str(key)) for key in path)
        if path and kind not in seen:
            seen.add(kind)
            yield path, value


def others_of(value: Any) -> list[Any]:
    """The values that replace a value: of other types, out of range and, of a number, the value of another step."""
    others = [each for each in OTHERS if not (each is True and value == 1)]
    if isinstance(value, Tensor) and value.is_floating_point() and value.numel() > 1:
        others += [value.int(), value * float("nan"), value[:1].clone(), -1 - value]
    return others


def damages_of_keys(source: Path, name: str, content: Any, save: Callable[[Any], bytes]) -> Iterator[Damage]:
    """Each kind of value of a file replaced by each of the others."""
    for path, value in one_of_a_kind(paths_in(content)):
        for other in others_of(value):
            said = "deleted" if other is DELETED else repr(other)
            yield (
                f"{name} {'.'.join(map(str, path))} {said:.60}",
                lambda at, path=path, other=other: put(at / name, save(with_value(content, path, other))),
            )


def as_saved(value: Any) -> bytes:
    file = io.BytesIO()
    with under_their_names():
        torch.save(value, file)
    return file.getvalue()


def damages_of(source: Path) -> Iterator[Damage]:
    """All damages of a checkpoint."""
    yield from damages_of_files(source)
    with under_their_names():
        for path in sorted(source.rglob("*.pt")):
            if "norm" not in str(path.parent):
                saved = torch.load(path, weights_only=False)
                yield from damages_of_keys(source, str(path.relative_to(source)), saved, as_saved)
    for path in source.rglob(".metadata"):
        yield from damages_of_keys(source, str(path.relative_to(source)), pickle.loads(path.read_bytes()), pickle.dumps)
        values = contents(path.parent) if source.name != "megatron" else {}
        for (name,), value in one_of_a_kind(((name,), value) for name, value in values.items()):
            for other in others_of(value):
                changed = {key: each for key, each in values.items() if key != name or other is not DELETED}
                changed |= {} if other is DELETED else {name: other}
                yield f"{name} {other!r:.40}", lambda at, changed=changed: write_again(at, changed)
    for path in source.rglob("metadata.json"):
        saved = json.loads(path.read_text())
        yield from damages_of_keys(source, str(path.relative_to(source)), saved, as_json)


def as_json(value: Any) -> bytes:
    return json.dumps(value, default=str).encode()


def outcome(source: Path, hf: Path, folder: Path, damage: Callable[[Path], None], expected: dict[str, Any]) -> str:
    """Return how a conversion of a damaged checkpoint breaks the rule; empty if it does not."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    at, out = folder / "source", folder / "out"
    shutil.copytree(source, at, copy_function=os.link)
    damage(at)
    try:
        convert(at, out, "dcp" if source.name != "hf" else "torchtitan", model=str(hf) if source.name != "hf" else None)
    except InputError as error:
        left = sorted(path.name for path in folder.iterdir())
        said = str(error)
        if left != ["source"]:
            return f"left {left}"
        return "" if str(at) in said and "Error:" not in said else f"says {said}"
    except Exception as error:
        return f"raises {type(error).__name__}: {error}"
    result = content_of(read_state(out, str(hf)))
    wanted = expected if source.name != "hf" else {key: each for key, each in expected.items() if "weight " in key}
    keys = [key for key, value in wanted.items() if not is_same({key: value}, {key: result.get(key)})]
    return f"has other values: {keys[:3]}" if keys else ""


@pytest.mark.parametrize(("format", "every"), rest_prove([QUICK, *((name, 1) for name in FORMATS)], QUICK))
def test_a_damaged_checkpoint_is_refused_with_its_file_or_gives_the_state_of_the_undamaged_one(
    sources: tuple[Path, dict[str, Any]], tmp_path: Path, format: str, every: int
) -> None:
    folder, expected = sources
    broken = {}
    for name, damage in islice(damages_of(folder / format), 0, None, every):
        if problem := outcome(folder / format, folder / "hf", tmp_path / "one", damage, expected):
            broken[name] = problem
    assert not broken
