"""Proves that `merge` writes the weighted mean of checkpoints, with the tokenizer, and refuses checkpoints that do not
belong together."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from typer.testing import CliRunner, Result

from shardwright.cli.main import app
from shardwright.training import importing
from shardwright.training.exporting import export
from shardwright.training.merging import merge
from shardwright.training.weights import open_weights
from tests.mutation import Mutation, mutated


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights in several blocks each, and in several files."""
    monkeypatch.setattr(importing, "BLOCK_BYTES", 256)
    monkeypatch.setattr(importing, "FILE_BYTES", 2048)


@pytest.fixture
def checkpoints(uninterrupted: Path) -> list[Path]:
    return sorted((uninterrupted.parent / "out" / "checkpoints").iterdir())


def run_merge(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["merge", *map(str, arguments)])


def read(folder: Path) -> dict[str, Tensor]:
    weights = open_weights(folder)
    return {name: weights.read(name, [0] * len(shape), shape) for name, shape in weights.shapes.items()}


def is_mean(folder: Path, sources: list[Path], shares: list[float]) -> bool:
    """Return whether weights are the mean of others, by float64 sums of whole tensors."""
    of_each = [read(source) for source in sources]
    return all(
        torch.equal(tensor, sum(s * each[name].double() for s, each in zip(shares, of_each, strict=True)).float())
        for name, tensor in read(folder).items()
    )


def test_the_last_checkpoints_of_a_run_become_their_mean_which_other_verbs_take(
    checkpoints: list[Path], tmp_path: Path
):
    run, out = checkpoints[0].parents[1], tmp_path / "mean"
    result = run_merge(run, "--last", 2, "--out", out)
    assert result.exit_code == 0, result.output
    assert all(f"0.5  {path}" in result.output for path in checkpoints)
    assert is_mean(out, checkpoints, [0.5] * 2)
    exported = CliRunner().invoke(app, ["export", str(out), "--out", str(tmp_path / "hf")])
    assert exported.exit_code == 0, exported.output
    assert torch.equal(load_file(tmp_path / "hf" / "model.safetensors")["model.norm.weight"], read(out)["norm.weight"])
    generated = CliRunner().invoke(app, ["generate", str(out), "--prompt", "def ", "--max-tokens", "2", "--json"])
    assert generated.exit_code == 0, generated.output  # it has the tokenizer of the run's data


def test_shares_outside_0_to_1_reach_beyond_the_two_checkpoints(checkpoints: list[Path], tmp_path: Path):
    merge(checkpoints, tmp_path / "beyond", [-0.5, 1.5])
    assert is_mean(tmp_path / "beyond", checkpoints, [-0.5, 1.5])
    told = run_merge(*checkpoints, "--shares", "0.25,0.75", "--out", tmp_path / "between", "--json")
    assert [each["share"] for each in json.loads(told.stdout)["sources"]] == [0.25, 0.75]


READ = "shardwright.training.merging:MergedWeights.read"
WRITE = "shardwright.training.importing:write_weights_folder"


@pytest.mark.parametrize(
    ("function", "right", "wrong"),
    [
        (
            READ,
            "total.add_(source.read(name, offsets, shape), alpha=share)",
            "total.add_(source.read(name, offsets, shape), alpha=1 / len(self.shares))",
        ),
        (READ, "source.read(name, offsets, shape)", "self.sources[0].read(name, offsets, shape)"),
        (READ, "torch.float64", "torch.bfloat16"),
        (
            WRITE,
            "weights.read(name, piece.offsets, piece.entry.shape)",
            "weights.read(name, (0, 0)[: len(piece.entry.shape)], piece.entry.shape)",
        ),
    ],
    ids=["equal shares", "one source", "sums in 16 bits", "the first block again"],
)
def test_a_wrong_mean_is_seen(function: str, right: str, wrong: str, checkpoints: list[Path], tmp_path: Path):
    with mutated(Mutation(function, right, wrong)):
        merge(checkpoints, tmp_path / "out", [0.3, 0.7])
    assert not is_mean(tmp_path / "out", checkpoints, [0.3, 0.7])


def test_what_cannot_be_merged_is_one_sentence_each(checkpoints: list[Path], tmp_path: Path):
    run, out = checkpoints[0].parents[1], tmp_path / "out"
    other = tmp_path / "other"
    export(run, other)
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps(config | {"rms_norm_eps": 1e-3}))
    for arguments, said in (
        ([run], "1 checkpoint to merge; name two or more, or a run with --last N"),
        ([run, "--last", 1], "--last 1: "),
        ([run, "--last", 99], "2 checkpoints; valid: 2 (checkpoint.keep_last"),
        ([run, run, "--last", 2], "--last 2 takes the checkpoints of one run, and 2 sources are named"),
        ([*checkpoints, "--shares", "0.5,0.6"], "they add up to 1.1; they have to add up to 1"),
        ([*checkpoints, "--shares", "0.3333333,0.6666666"], "they add up to 0.9999999; they have to add up to 1"),
        ([*checkpoints, "--shares", "1"], "1 share for 2 checkpoints; give one for each"),
        ([*checkpoints, "--shares", "nan,nan"], "a share is a finite number"),
        ([*checkpoints, "--shares", "a,b"], "numbers separated by commas are needed"),
        ([checkpoints[0], other], f"{other} is of another model than {checkpoints[0]}: norm_eps=0.001 and "),
        ([checkpoints[0], tmp_path / "nothing"], "there is no such folder"),
    ):
        result = run_merge(*arguments, "--out", out)
        assert (result.exit_code, said in result.output) == (2, True), result.output
        assert not out.exists()
