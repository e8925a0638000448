"""Damages of the files of a checkpoint, for any format: bytes, whole files, and single values in pickles and JSON."""

import copy
import io
import json
import math
import pickle
from collections.abc import Callable, Iterator
from enum import Enum
from pathlib import Path
from random import Random
from typing import Any

import torch
from torch import Tensor

from tests.conversion.zero_files import under_their_names

Damage = tuple[str, Callable[[Path], None]]
"""A name, and the change of a copy of the checkpoint."""
REPLACED = "replaced by"
_NOTHING = object()
_OTHERS: tuple[Any, ...] = (
    None,
    True,
    -1,
    2**62,
    1e300,
    math.nan,
    math.inf,
    "",
    "wörter",
    (),
    [],
    {},
    (1, "a"),
    {"a": 1},
)


def _bytes(relative: str, change: Callable[[bytes], bytes]) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        path = folder / relative
        content = path.read_bytes()
        path.unlink()  # the copy has links to the files of the source
        path.write_bytes(change(content))

    return damage


def _flip(at: int, mask: int) -> Callable[[bytes], bytes]:
    return lambda content: content[:at] + bytes([content[at] ^ mask]) + content[at + 1 :]


def file_damages(folder: Path, random: Random, n_flips: int) -> Iterator[Damage]:
    """Yield damages of each file: removed, emptied, cut, longer, a byte flipped, and replaced by another file."""
    files = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
    for name in files:
        size = (folder / name).stat().st_size
        yield f"{name} removed", lambda at, name=name: (at / name).unlink()
        for end in sorted({0, size // 3, size - 1}):
            yield f"{name} cut to {end}", _bytes(name, lambda content, end=end: content[:end])
        yield f"{name} longer", _bytes(name, lambda content: content + b"\0" * 64)
        for at in random.sample(range(size), min(n_flips, size)):
            yield f"{name} flipped at {at}", _bytes(name, _flip(at, 1 << random.randrange(8)))
        alike = [each for each in files if each != name and Path(each).suffix == Path(name).suffix]
        for each in random.sample(alike, min(2, len(alike))):
            content = (folder / each).read_bytes()
            yield f"{name} {REPLACED} {each}", _bytes(name, lambda _, content=content: content)


def value_damages(folder: Path, random: Random, per_file: int) -> Iterator[Damage]:
    """Yield damages of values: of each JSON file and each pickle, `per_file` of them, drawn."""
    for path in sorted(each for each in folder.rglob("*") if each.is_file()):
        name = path.relative_to(folder).as_posix()
        forms = {".json": (json.loads, lambda value: json.dumps(value).encode()), ".pt": (_load, _save)}
        forms |= {".metadata": (pickle.loads, pickle.dumps)}
        if (form := forms.get(path.suffix or path.name)) is None:
            continue
        with under_their_names():
            variants = [*_variants(form[0](path.read_bytes()), random)]
        for place, value in random.sample(variants, min(per_file, len(variants))):
            try:
                with under_their_names():
                    content = form[1](value)
            except (AttributeError, RuntimeError):  # PyTorch itself cannot pickle this value
                continue
            yield f"{name}: {place}", _bytes(name, lambda _, content=content: content)


def _load(content: bytes) -> Any:
    return torch.load(io.BytesIO(content), weights_only=False)


def _save(value: Any) -> bytes:
    content = io.BytesIO()
    torch.save(value, content)
    return content.getvalue()


def _variants(value: Any, random: Random) -> Iterator[tuple[str, Any]]:
    """Yield (place and change, the whole value with the change) for each value in nested dicts, lists and objects."""
    parts: list[Any] = []
    if isinstance(value, dict):
        parts = list(value)
    elif isinstance(value, list | tuple):
        parts = list(range(len(value)))
    elif isinstance(value, Tensor):
        for name, other in _other_tensors(value).items():
            yield f" = {name}", other
    elif hasattr(value, "__dict__") and not isinstance(value, type | Enum):
        parts = list(vars(value))
    for key in parts:
        of = value[key] if isinstance(value, dict | list | tuple) else vars(value)[key]
        yield f".{key} missing", _replaced(value, key, _NOTHING)
        for place, other in _variants(of, random):
            yield f".{key}{place}", _replaced(value, key, other)
    for other in random.sample(_OTHERS, 4):
        yield f" = {other!r}", other


def _replaced(value: Any, key: Any, other: Any) -> Any:
    if isinstance(value, list | tuple):
        parts = [each for each in (*value[:key], other, *value[key + 1 :]) if each is not _NOTHING]
        try:
            return type(value)(parts)
        except TypeError:  # torch.Size of other values
            return tuple(parts)
    result = copy.copy(value)
    table = result if isinstance(result, dict) else vars(result)
    if other is _NOTHING:
        del table[key]
    else:
        table[key] = other
    return result


def _other_tensors(value: Tensor) -> dict[str, Any]:
    value = value.detach()
    wide = {"nan": torch.full_like(value, math.nan)} if value.is_floating_point() else {}
    return wide | {
        "complex": value.to(torch.complex64), "integers": value.to(torch.int64), "half": value.to(torch.float16),
        "longer": torch.cat([value.flatten(), value.flatten()[:1]]), "empty": value.flatten()[:0],
        "meta": value.to("meta"), "sparse": value.to_sparse(), "words": [1, "a"], "bool": value.to(torch.bool),
        "strided": value.expand(3, *value.shape),
    }  # fmt: skip
