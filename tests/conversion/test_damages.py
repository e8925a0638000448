"""A damaged checkpoint is refused with its file named, or has the bits of the whole one; nothing half-written stays."""

import json
import os
import shutil
from pathlib import Path
from random import Random

import pytest
import torch
from torch import Tensor

from shardwright.config import load
from shardwright.conversion.formats import convert, read_state
from shardwright.system.errors import InputError
from tests.conversion.damages import REPLACED, Damage, file_damages, value_damages
from tests.conversion.test_convert import write_run_file as write_run_file_64
from tests.conversion.test_megatron import write_run_file
from tests.conversion.torchtitan_loop import train_ranks
from tests.conversion.zero_files import random_values, write_zero
from tests.distributed import run_ranks

FORMATS = ("torchtitan", "dcp", "megatron", "zero2", "zero3", "universal", "hf", "shardwright")
MOST = 60
"""Damages of a format that are tried, drawn."""


def is_seen(kind: str, damage: Damage) -> bool:
    """Return whether files have what shows a damage. Hugging Face's have no check sums, and the files of ranks do not
    name their rank or parameters, so a file replaced by another with the same shapes has plausible values."""
    return kind != "hf" and (kind in ("shardwright", "universal") or REPLACED not in damage[0])


def write_source(kind: str, folder: Path, run_file: Path, tokens: Path) -> None:
    """Write a small checkpoint."""
    if kind == "torchtitan":
        run_ranks(train_ranks, 2, tokens, None, {5: folder})
        return
    stage = int(kind[4:]) if kind.startswith("zero") else 2
    zero = folder if kind.startswith("zero") else folder.with_name("zero")
    write_zero(zero, random_values(load(run_file).model.spec()), stage, 2)
    if zero == folder:
        return
    own = folder if kind == "shardwright" else folder.with_name("own")
    convert(zero, own, "shardwright", run=run_file)
    if own != folder:
        convert(own, folder, "deepspeed-universal" if kind == "universal" else kind)


def state_of(folder: Path) -> dict[str, Tensor | str]:
    """Every tensor of a converted state, its settings and its counters."""
    state = read_state(folder)
    tensors: dict[str, Tensor | str] = {
        f"{kind} {name}": each.read(name, (0,) * len(shape), shape)
        for kind, each in ({"weight": state.weights} | dict(state.moments)).items()
        for name, shape in each.shapes.items()
    }
    return tensors | {"rest": f"{state.settings} {state.step} {state.tokens} {state.samples} {state.spec}"}


def differing(one: dict[str, Tensor | str], other: dict[str, Tensor | str]) -> list[str]:
    if one.keys() != other.keys():
        return ["names"]
    return [
        name
        for name, value in one.items()
        if not (torch.equal(value, other[name]) if isinstance(value, Tensor) else value == other[name])
    ]


def problem_of(
    damage: Damage, source: Path, run_file: Path, folder: Path, expected: dict[str, Tensor | str] | None
) -> str:
    """Return what is wrong with the conversion of a damaged copy, or nothing. `expected`: None if values may differ."""
    at, out = folder / "damaged", folder / "moved"
    shutil.copytree(source, at, copy_function=os.link)
    try:
        damage[1](at)
        before = sorted(folder.rglob("*"))
        convert(at, out, "shardwright", run=run_file)
        others = [] if expected is None else differing(state_of(out), expected)
        return f"differs silently in {others}" if others else ""
    except InputError as error:
        if sorted(folder.rglob("*")) != before:
            return "something is left"
        unnamed = "" if f"{at}" in str(error) else "names no file: "
        return unnamed and f"{unnamed}{error}"
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    finally:
        shutil.rmtree(at)
        shutil.rmtree(out, ignore_errors=True)


@pytest.mark.prove
@pytest.mark.parametrize("kind", FORMATS)
def test_a_damaged_checkpoint_is_refused_or_has_the_bits_of_the_whole_one(
    kind: str, tmp_path: Path, ragged_tokens: Path
) -> None:
    run_file = (write_run_file_64 if kind == "torchtitan" else write_run_file)(tmp_path, ragged_tokens)
    source, folder = tmp_path / kind, tmp_path / "tried"
    write_source(kind, source, run_file, ragged_tokens)
    convert(source, tmp_path / "whole", "shardwright", run=run_file)
    folder.mkdir()
    expected, problems = state_of(tmp_path / "whole"), {}
    random = Random(0)
    damages = [*file_damages(source, random, n_flips=6), *value_damages(source, random, per_file=40)]
    assert len(damages) > MOST
    for damage in random.sample(damages, min(MOST, len(damages))):
        values = expected if is_seen(kind, damage) else None
        if problem := problem_of(damage, source, run_file, folder, values):
            problems[damage[0]] = problem[:300]
    assert not problems, json.dumps(problems, indent=1)
