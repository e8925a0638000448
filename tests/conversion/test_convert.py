import json
import os
import pickle
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from shardwright.config import load
from shardwright.conversion.dcp import DcpWriter, read_dcp
from shardwright.conversion.formats import convert
from shardwright.conversion.own import read_own_state, write_own_state
from shardwright.system.errors import CheckpointError, InputError, ProofError
from shardwright.training.checkpoint.manifest import read_manifest
from shardwright.training.weights import ShardedTensors
from tests.conversion.conftest import SAVED
from tests.conversion.torchtitan_loop import RUN_FILE, Llama, train_ranks
from tests.distributed import run_ranks
from tests.mutation import mutated
from tests.training.bugs.conversion import FILES as BUGS
from tests.training.plain_loop import EPS, SEQ_LEN, WEIGHT_DECAY
from tests.training.runs import records, train

TOLERANCE = 1e-10  # of sums in another order in float64


def write_run_file(folder: Path, tokens: Path, more: str = "") -> Path:
    path = folder / "run.toml"
    data = f'data = {{ path = "{tokens}", sequences = "documents" }}'
    path.write_text(f'out = "{folder / "out"}"\n{data}\n{RUN_FILE}{more}')
    return path


def close(losses: dict[int, float], expected: dict[int, float]) -> bool:
    return all(abs(loss - expected[step]) <= TOLERANCE for step, loss in losses.items())


@pytest.mark.prove
def test_a_run_of_fsdp2_continues_here_and_back_there_with_the_losses_of_an_uninterrupted_run(
    two_ranks: tuple[Path, dict[int, float]], ragged_tokens: Path, tmp_path: Path
) -> None:
    source, expected = two_ranks
    more = "layout = { tp = 2 }\ncheckpoint = { every = 3, keep_last = 9 }\n"
    run_file = write_run_file(tmp_path, ragged_tokens, more)
    convert(source, tmp_path / "moved", "shardwright", run=run_file)
    train(run_file, "--set", f"checkpoint.resume={tmp_path / 'moved'}")
    here = {record["step"]: record["loss"] for record in records(run_file) if record["kind"] == "train"}
    assert here.keys() == set(range(6, 12))
    assert close(here, expected)
    convert(tmp_path / "out/checkpoints/step-00000009", tmp_path / "back", "torchtitan")
    there = run_ranks(train_ranks, 2, ragged_tokens, tmp_path / "back", {})[0]
    assert there.keys() == {10, 11}
    assert close(there, expected)


@pytest.mark.prove
def test_a_checkpoint_of_two_replicas_of_two_shards_continues_here(ragged_tokens: Path, tmp_path: Path) -> None:
    source = tmp_path / "step-5"
    expected = run_ranks(train_ranks, 4, ragged_tokens, None, {SAVED: source})[0]
    run_file = write_run_file(tmp_path, ragged_tokens, "layout = { dp_shard = 2, zero = 3 }\n")
    convert(source, tmp_path / "moved", "shardwright", run=run_file)
    train(run_file, "--set", f"checkpoint.resume={tmp_path / 'moved'}")
    here = {record["step"]: record["loss"] for record in records(run_file) if record["kind"] == "train"}
    assert here.keys() == set(range(6, 12))
    assert close(here, expected)


def contents(folder: Path) -> dict[str, Any]:
    """Every tensor and number of a distributed checkpoint."""
    opened = read_dcp(folder)
    shards = ShardedTensors(opened.tensors, opened.read_shard)
    tensors = {name: shards.read(name, (0,) * len(shape), shape) for name, shape in shards.shapes.items()}
    return tensors | {name: opened.value(name) for name, _ in opened.places if name not in tensors}


def test_a_checkpoint_that_is_converted_there_and_back_has_the_same_bits(
    two_ranks: tuple[Path, dict[int, float]], ragged_tokens: Path, tmp_path: Path
) -> None:
    run_file, source = write_run_file(tmp_path, ragged_tokens), contents(two_ranks[0])
    convert(two_ranks[0], tmp_path / "own", "shardwright", run=run_file)
    convert(tmp_path / "own", tmp_path / "dcp", "dcp")
    convert(tmp_path / "dcp", tmp_path / "titan", "torchtitan")
    back = contents(tmp_path / "titan")
    assert back.keys() == source.keys()
    for name, value in source.items():
        if isinstance(value, Tensor):
            assert torch.equal(back[name], value), name
        else:  # a learning rate is computed by two formulas
            assert back[name] == (pytest.approx(value, rel=1e-15) if isinstance(value, float) else value), name


def test_weights_of_another_model_than_the_run_files_are_refused(
    two_ranks: tuple[Path, dict[int, float]], ragged_tokens: Path, tmp_path: Path
) -> None:
    run_file = write_run_file(tmp_path, ragged_tokens)
    convert(two_ranks[0], tmp_path / "hf", "hf", run=run_file)
    convert(tmp_path / "hf", tmp_path / "same", "shardwright", run=run_file)
    config = json.loads((tmp_path / "hf/config.json").read_text())
    (tmp_path / "hf/config.json").write_text(json.dumps(config | {"rms_norm_eps": 0.5}))
    with pytest.raises(CheckpointError, match=r"of another model: norm_eps=0\.5, and the run file has"):
        convert(tmp_path / "hf", tmp_path / "other", "shardwright", run=run_file)
    assert not (tmp_path / "other").exists()


@pytest.mark.prove
def test_transformers_computes_the_logits_of_the_model_that_torch_has_trained(
    two_ranks: tuple[Path, dict[int, float]], ragged_tokens: Path, tmp_path: Path
) -> None:
    transformers = pytest.importorskip("transformers")
    run_file = write_run_file(tmp_path, ragged_tokens)
    remarks = convert(two_ranks[0], tmp_path / "hf", "hf", run=run_file).remarks
    assert any("optimizer" in remark for remark in remarks)
    model = Llama().double()
    model.load_state_dict(
        {name: tensor for name, tensor in contents(two_ranks[0]).items() if name in model.state_dict()}
    )
    ids = torch.arange(2 * SEQ_LEN).view(2, SEQ_LEN)
    there = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf", dtype=torch.float64)
    torch.testing.assert_close(there(ids).logits, model(ids), rtol=0, atol=1e-5)  # rotations in float32


class Intruder:
    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, ("intruder",)


def damage_rank_file(folder: Path) -> None:
    (folder / "__1_0.distcp").unlink()


def damage_length(folder: Path) -> None:
    path = folder / "__0_0.distcp"
    path.write_bytes(path.read_bytes()[:-1])


def damage_metadata(folder: Path) -> None:
    (folder / ".metadata").write_bytes((folder / ".metadata").read_bytes()[:-40])


def put_in_a_class(folder: Path) -> None:
    (folder / ".metadata").write_bytes(pickle.dumps(Intruder()))


def remove_metadata(folder: Path) -> None:
    (folder / ".metadata").unlink()


def write_again(folder: Path, values: dict[str, Any]) -> None:
    """Write a distributed checkpoint of these values over the one in the folder."""
    for path in [*folder.glob("*.distcp"), folder / ".metadata"]:
        path.unlink()
    writer = DcpWriter(folder)
    for name, value in values.items():
        if isinstance(value, Tensor):
            writer.write_tensor((name,), tuple(value.shape), [((0,) * value.dim(), value)])
        else:
            writer.write_object((name,), value)
    writer.finish()


def mix_steps(folder: Path) -> None:
    write_again(folder, contents(folder) | {"train_state.step": 6})


def mix_ranks(folder: Path) -> None:
    values = contents(folder)
    write_again(folder, values | {"optimizer.state.norm.weight.step": torch.tensor(4.0)})


def change_optimizer(folder: Path) -> None:
    values = {name.replace("exp_avg_sq", "momentum_buffer"): value for name, value in contents(folder).items()}
    write_again(folder, values)


def leave_out_settings(folder: Path) -> None:
    write_again(folder, {name: value for name, value in contents(folder).items() if "param_groups" not in name})


def leave_out_layer(folder: Path) -> None:
    write_again(folder, {name: value for name, value in contents(folder).items() if "layers.1." not in name})


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (damage_rank_file, "__1_0.distcp is missing; it has parts of .* tensors: copy the files of all ranks"),
        (damage_length, "__0_0.distcp is damaged: it has .* bytes, and .metadata says"),
        (damage_metadata, ".metadata is damaged"),
        (put_in_a_class, ".metadata needs posix.mkdir, and only the classes of PyTorch's"),
        (remove_metadata, "has no .metadata, which is written last: the checkpoint was not completed"),
        (mix_steps, "its parts are of different steps .*train_state.step=6"),
        (mix_ranks, "its parts are of different steps .*1 parameters at step 4"),
        (change_optimizer, "the optimizer has states momentum_buffer .*supported: AdamW"),
        (leave_out_settings, "has moments of .*, and no settings of AdamW"),
        (leave_out_layer, "layers.1.attention.qkv_linear.wk.weight is missing"),
    ],
)
def test_a_source_that_is_no_whole_state_of_adamw_is_refused_and_nothing_is_written(
    two_ranks: tuple[Path, dict[int, float]],
    ragged_tokens: Path,
    tmp_path: Path,
    damage: Callable[[Path], None],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shutil.copytree(two_ranks[0], tmp_path / "source")
    run_file = write_run_file(tmp_path, ragged_tokens)
    damage(tmp_path / "source")
    monkeypatch.chdir(tmp_path)
    before = sorted(path.name for path in tmp_path.iterdir())
    with pytest.raises(InputError, match=message):
        convert(tmp_path / "source", tmp_path / "moved", "shardwright", run=run_file)
    assert sorted(path.name for path in tmp_path.iterdir()) == before


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("beta2 = 0.97", "AdamW has beta2=0.97 there, and the run file has 0.9; set optimizer.beta2=0.97"),
        ("weight_decay = 0.3", "weight decay of .* is 0.3 there, and 0.9 in the run"),
        ("global_batch = 8", "was trained on 640 tokens in 5 steps, and 4 x 16 tokens a step in the run file make 320"),
        ('compute = "fp64"', "the weights are float64, and the run file .* makes it float32"),
        ("d_ffn = 24", "layers.0.feed_forward.w1.weight is .24, 16., and the model makes it .48, 16."),
    ],
)
def test_a_run_file_of_another_run_is_refused_with_the_key_to_set(
    two_ranks: tuple[Path, dict[int, float]], ragged_tokens: Path, tmp_path: Path, setting: str, message: str
) -> None:
    others = {"beta2": "0.9", "weight_decay": "0.9", "global_batch": "4", "compute": '"fp32"', "d_ffn": "48"}
    run_file = write_run_file(tmp_path, ragged_tokens)
    key = setting.split(" = ")[0]
    text = run_file.read_text()
    assert setting in text
    run_file.write_text(text.replace(setting, f"{key} = {others[key]}"))
    with pytest.raises(InputError, match=message):
        convert(two_ranks[0], tmp_path / "moved", "shardwright", run=run_file)
    assert not (tmp_path / "moved").exists()


@pytest.mark.prove
def test_the_values_to_set_for_a_run_with_mup_are_of_the_base_model(ragged_tokens: Path, tmp_path: Path) -> None:
    run_file = write_run_file(tmp_path, ragged_tokens, "mup = { base_width = 8, base_depth = 1 }\n")
    train(run_file, "--set", "steps=3")
    convert(tmp_path / "out", tmp_path / "dcp", "dcp")
    convert(tmp_path / "dcp", tmp_path / "own", "shardwright", run=run_file)
    saved, back = (read_manifest(at) for at in (tmp_path / "out/checkpoints/step-00000003", tmp_path / "own"))
    assert back.tensors.keys() == saved.tensors.keys()
    state = read_own_state(tmp_path / "out")
    assert len({each.eps for each in state.settings.values()}) == 2
    others = ["optimizer.eps=1e-5", "optimizer.weight_decay=0.2"]
    with pytest.raises(InputError) as refused:
        write_own_state(state, tmp_path / "other", load(run_file, others))
    to_set = dict(re.findall(r"set optimizer\.(eps|weight_decay_by_kind\.\w+)=(\S+)", str(refused.value)))
    assert {float(to_set.pop("eps")), *map(float, to_set.values())} == {EPS, WEIGHT_DECAY}
    assert "weight_decay_by_kind.matrix" in to_set
    equal = {name: replace(each, eps=EPS) for name, each in state.settings.items()}
    message = f"AdamW has eps={EPS:g} for .* and eps={EPS:g} for .* there, .*; no optimizer.eps makes these"
    with pytest.raises(InputError, match=message):
        write_own_state(replace(state, settings=equal), tmp_path / "other", load(run_file))


def test_every_format_is_proven_to_compute_the_logits_gradients_and_the_update_of_its_source(
    two_ranks: tuple[Path, dict[int, float]], ragged_tokens: Path, tmp_path: Path
) -> None:
    run_file = write_run_file(tmp_path, ragged_tokens)
    source = two_ranks[0]
    for to in ("shardwright", "torchtitan", "dcp", "hf"):
        remarks = convert(source, tmp_path / to, to, run=run_file, prove=True).remarks
        proved = [remark.split(":")[1].strip() for remark in remarks if remark.startswith("proved: ")]
        assert proved[1:] == ["logits", "loss", "gradient", *(["update"] if to != "hf" else [])]
        source = tmp_path / to
    assert not list(tmp_path.glob("*.unproven*"))


def convert_there_and_back(source: Path, own: Path, folder: Path, run_file: Path) -> None:
    convert(source, folder / "moved", "shardwright", run=run_file, prove=True)
    convert(own, folder / "back", "torchtitan", prove=True)


@pytest.mark.prove
@pytest.mark.parametrize("name", BUGS)
def test_a_bug_of_the_conversion_is_refused_by_its_proof(
    two_ranks: tuple[Path, dict[int, float]], ragged_tokens: Path, tmp_path: Path, name: str
) -> None:
    run_file = write_run_file(tmp_path, ragged_tokens)
    convert(two_ranks[0], tmp_path / "own", "shardwright", run=run_file)
    refusal = r"computes other values|has counted 6 updates after 5 steps|exp_avg_sq has \d+ negative elements"
    with mutated(*BUGS[name].mutations), pytest.raises((ProofError, CheckpointError), match=refusal):
        convert_there_and_back(two_ranks[0], tmp_path / "own", tmp_path, run_file)
    assert {path.name for path in tmp_path.iterdir()} <= {"run.toml", "own", "moved"}
