"""Megatron's checkpoints in torch_dist. With the library itself, in an environment of its own (pip install
torch==2.13.0 numpy einops pyyaml psutil; pip install --no-deps megatron-core==0.16.1), 1 to 7 minutes for each of the
five runs there and back:

MEGATRON_PYTHON=/tmp/megatron-env/bin/python pytest tests/conversion/test_megatron.py
"""

import json
import os
import pickle
import re
import shutil
import subprocess
from argparse import Namespace
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from shardwright.config import load
from shardwright.conversion.dcp import DcpWriter, read_dcp
from shardwright.conversion.formats import convert, read_state
from shardwright.conversion.megatron import step_folder
from shardwright.model.spec import ModelSpec
from shardwright.system import torch_private
from shardwright.system.errors import InputError, ProofError
from shardwright.verification import trainers
from tests.conversion import torchtitan_loop
from tests.conversion.test_convert import Intruder, contents
from tests.conversion.torchtitan_loop import batches
from tests.conversion.zero_files import random_values, write_zero
from tests.mutation import mutated
from tests.training import plain_loop
from tests.training.bugs.megatron import FILES as BUGS
from tests.training.plain_loop import plain_rate
from tests.training.runs import records, train

TOLERANCE = 5e-6  # of losses near 5.5 in float32, whose units there are 4.8e-7
LIBRARY = os.environ.get("MEGATRON_PYTHON")
STEP, EXPERTS, PADDED = 5, 4, 320
MIXTURE = (
    f"moe = {{ n_experts = {EXPERTS}, top_k = 2, d_ffn = 24, normalise = true, bias_rate = 0.0, aux_loss = 0.0 }}, "
    f"qk_norm = true, "
)


def write_run_file(folder: Path, tokens: Path, more: str = "") -> Path:
    folder.mkdir(exist_ok=True)
    path = folder / "run.toml"
    data = f'data = {{ path = "{tokens}", sequences = "documents" }}'
    rest = torchtitan_loop.RUN_FILE.replace("fp64", "fp32").replace("n_layers", f"{more}n_layers")
    path.write_text(f'out = "{folder / "out"}"\n{data}\n{rest}checkpoint = {{ every = 3, keep_last = 9 }}\n')
    return path


@pytest.fixture
def run_file(ragged_tokens: Path, tmp_path: Path) -> Path:
    return write_run_file(tmp_path, ragged_tokens)


def write_own(folder: Path, run_file: Path) -> None:
    """A checkpoint of ours with random weights and moments."""
    write_zero(folder.with_name("zero"), random_values(load(run_file).model.spec()), 2, 1)
    convert(folder.with_name("zero"), folder, "shardwright", run=run_file)


@pytest.fixture
def saved(tmp_path: Path, run_file: Path) -> Path:
    """A checkpoint of Megatron."""
    write_own(tmp_path / "own", run_file)
    convert(tmp_path / "own", tmp_path / "saved", "megatron")
    return tmp_path / f"saved/iter_{STEP:07d}"


def state_of(folder: Path) -> dict[str, Tensor]:
    """Every tensor of a training state, by kind and our name."""
    state = read_state(folder)
    return {
        f"{kind} {name}": each.read(name, (0,) * len(shape), shape)
        for kind, each in ({"weight": state.weights} | dict(state.moments)).items()
        for name, shape in each.shapes.items()
    }


def equal(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def write_again(folder: Path, tensors: Mapping[str, Tensor]) -> None:
    for path in [*folder.glob("*.distcp"), folder / ".metadata"]:
        path.unlink()
    writer = DcpWriter(folder)
    for name, value in tensors.items():
        writer.write_tensor((name,), tuple(value.shape), [((0,) * value.dim(), value)])
    writer.finish()


def one_by_one(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The form of `singleton_local_shards`: a tensor for each layer, gate and up apart, the vocabulary padded."""
    result = {}
    for name, value in tensors.items():
        if re.search(r"word_embeddings|output_layer", name):
            result[name] = torch.cat([value, torch.full((PADDED - len(value), value.shape[1]), 7.0)])
        elif "decoder.layers." not in name:
            result[name] = value
        for layer, of_layer in enumerate(value) if "decoder.layers." in name else ():
            of_one = name.replace("decoder.layers.", f"decoder.layers.{layer}.")
            parts = of_layer.chunk(2) if name.endswith("linear_fc1.weight") else (of_layer,)
            for part, letter in zip(parts, ("_w", "_v") if len(parts) > 1 else ("",), strict=True):
                result[of_one + letter] = part.contiguous()
    return result


def there_and_back(folder: Path, run_file: Path) -> bool:
    """Whether a state has its bits after it was a checkpoint of Megatron in both forms."""
    write_own(folder / "own", run_file)
    convert(folder / "own", folder / "saved", "megatron", prove=True)
    convert(folder / "saved", folder / "back", "shardwright", run=run_file, prove=True)
    step = folder / f"saved/iter_{STEP:07d}"
    write_again(step, one_by_one(contents_of_tensors(step)))
    convert(folder / "saved", folder / "again", "shardwright", run=run_file)
    expected = state_of(folder / "own")
    return equal(state_of(folder / "back"), expected) and equal(state_of(folder / "again"), expected)


def contents_of_tensors(step: Path) -> dict[str, Tensor]:
    return {name: value for name, value in contents(step).items() if isinstance(value, Tensor)}


def test_a_state_has_the_same_bits_after_it_was_a_checkpoint_of_megatron_in_either_form(
    tmp_path: Path, run_file: Path
) -> None:
    assert there_and_back(tmp_path, run_file)


@pytest.mark.prove
def test_a_state_with_experts_has_the_same_bits_after_it_was_a_checkpoint_of_megatron(
    tmp_path: Path, ragged_tokens: Path
) -> None:
    run_file = write_run_file(tmp_path / "run", ragged_tokens, MIXTURE)
    write_own(tmp_path / "own", run_file)
    convert(tmp_path / "own", tmp_path / "saved", "megatron", prove=True)
    convert(tmp_path / "saved", tmp_path / "back", "shardwright", run=run_file, prove=True)
    assert equal(state_of(tmp_path / "back"), state_of(tmp_path / "own"))


@pytest.mark.prove
@pytest.mark.parametrize("name", BUGS)
def test_a_bug_of_reading_or_writing_megatron_is_refused_or_changes_bits(
    tmp_path: Path, run_file: Path, name: str
) -> None:
    with mutated(*BUGS[name].mutations):
        try:
            same = there_and_back(tmp_path, run_file)
        except (InputError, ProofError):
            same = False
    assert not same


def _common(folder: Path) -> dict[str, Any]:
    content: dict[str, Any] = torch.load(folder / "common.pt", weights_only=False)
    return content


def _change(folder: Path, change: Callable[[dict[str, Any]], None]) -> None:
    content = _common(folder)
    change(content)
    torch.save(content, folder / "common.pt")


def leave_out_file(folder: Path) -> None:
    (folder / "__0_0.distcp").unlink()


def leave_out_common(folder: Path) -> None:
    (folder / "common.pt").unlink()


def cut_file(folder: Path) -> None:
    path = folder / "__0_0.distcp"
    path.write_bytes(path.read_bytes()[:-1])


def cut_common(folder: Path) -> None:
    path = folder / "common.pt"
    path.write_bytes(path.read_bytes()[:-100])


def call_in_common(folder: Path) -> None:
    torch.save({"iteration": STEP, "args": Intruder()}, folder / "common.pt")


def call_in_metadata(folder: Path) -> None:
    (folder / ".metadata").write_bytes(pickle.dumps(Intruder()))


def mix_steps(folder: Path) -> None:
    _change(folder, lambda content: content.update(iteration=STEP + 1))


def mix_groups(folder: Path) -> None:
    _change(folder, lambda content: content["optimizer"]["optimizer"]["param_groups"][0].update(step=STEP - 1))


def change_optimizer(folder: Path) -> None:
    tensors = contents_of_tensors(folder)
    write_again(folder, {name.replace("exp_avg_sq", "momentum_buffer"): each for name, each in tensors.items()})


def change_sharding(folder: Path) -> None:
    _change(folder, lambda content: content["optimizer"].update(param_state_sharding_type="dp_reshardable"))


def change_format(folder: Path) -> None:
    (folder / "metadata.json").write_text('{"sharded_backend": "zarr"}')


def change_argument(folder: Path) -> None:
    _change(folder, lambda content: content.update(args=Namespace(rotary_base=10000, rotary_interleaved=True)))


def scale_positions(folder: Path) -> None:
    _change(folder, lambda content: content.update(args=Namespace(use_rope_scaling=True, rotary_interleaved=True)))


class ListedArguments(Namespace):
    """Pickled as a Namespace whose state is no table of attributes."""

    def __reduce__(self) -> tuple[Any, ...]:
        return Namespace, (), (None, {"rotary_base": 10000})


def list_arguments(folder: Path) -> None:
    _change(folder, lambda content: content.update(args=ListedArguments()))


def pipe_for_common(folder: Path) -> None:
    leave_out_common(folder)
    os.mkfifo(folder / "common.pt")


def many_layers(folder: Path) -> None:
    name = "decoder.layers.mlp.linear_fc2.weight"
    tensors = contents_of_tensors(folder)
    write_again(folder, tensors | {name: torch.cat((tensors[name], tensors[name]))})


def split_group(folder: Path) -> None:
    def change(content: dict[str, Any]) -> None:
        groups = content["optimizer"]["optimizer"]["param_groups"]
        groups.append(groups[0] | {"lr": 1.0})

    _change(folder, change)


def leave_out_groups(folder: Path) -> None:
    _change(folder, lambda content: content.update(optimizer={}))


def leave_out_layer(folder: Path) -> None:
    tensors = one_by_one(contents_of_tensors(folder))
    write_again(folder, {name: each for name, each in tensors.items() if ".layers.1.mlp.linear_fc2" not in name})


def latest_in_words(folder: Path) -> None:
    (folder.parent / "latest_checkpointed_iteration.txt").write_text("../elsewhere")


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (leave_out_file, "__0_0.distcp is missing; it has parts of .* tensors: copy the files of all ranks"),
        (leave_out_common, "common.pt is missing: copy the files of all ranks"),
        (cut_file, "__0_0.distcp is damaged: it has .* bytes, and .metadata says"),
        (cut_common, "common.pt is damaged"),
        (call_in_common, "common.pt needs other classes than Megatron's and PyTorch's.*posix.mkdir"),
        (call_in_metadata, ".metadata needs posix.mkdir, and only the classes of"),
        (mix_steps, r"its parts are of different steps \(common.pt is of step 6\)"),
        (mix_groups, "its parts are of different steps .*parameters at step 4"),
        (change_optimizer, "the optimizer has states momentum_buffer .*supported: AdamW"),
        (change_sharding, "in the form dp_reshardable, whose files do not name .*supported: fully_reshardable"),
        (change_format, "metadata.json: sharded_backend='zarr'; supported: 'torch_dist'"),
        (change_argument, "the run has rotary_base=10000, and the model has rope_theta=100.0"),
        (scale_positions, "the run has use_rope_scaling=True; supported: False"),
        (scale_positions, "the run has rotary_interleaved=True; supported: False"),
        (list_arguments, "common.pt is damaged"),
        (pipe_for_common, "common.pt"),
        (many_layers, r"linear_fc2.weight has the shape \[4, .*, and the model has 2 layers; give the model of the"),
        (split_group, "fits 2 groups of the optimizer with other settings"),
        (leave_out_groups, "common.pt: its optimizer has no param_groups"),
        (leave_out_layer, "decoder.layers.1.mlp.linear_fc2.weight is missing"),
        (latest_in_words, "elsewhere"),
    ],
)
def test_a_damaged_checkpoint_of_megatron_is_refused_and_nothing_is_written(
    saved: Path, run_file: Path, damage: Callable[[Path], None], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = run_file.parent
    damage(saved)
    monkeypatch.chdir(folder)
    before = sorted(path.name for path in folder.iterdir())
    with pytest.raises(InputError, match=message):
        convert(folder / "saved", folder / "moved", "shardwright", run=run_file)
    assert sorted(path.name for path in folder.iterdir()) == before


def test_padding_and_steps_without_an_update_are_reported(saved: Path, run_file: Path) -> None:
    write_again(saved, one_by_one(contents_of_tensors(saved)))
    for group in (0, 1):
        _change(saved, lambda content, n=group: content["optimizer"]["optimizer"]["param_groups"][n].update(step=4))
    result = convert(saved, run_file.parent / "moved", "dcp", run=run_file)
    assert result.state.step == 4
    assert any("20 rows of the vocabulary" in remark for remark in result.remarks)
    assert any("1 steps without an update" in remark for remark in result.remarks)


def test_weights_alone_are_a_release_that_is_read_again(saved: Path, run_file: Path) -> None:
    folder = run_file.parent
    convert(saved, folder / "hf", "hf", run=run_file)
    convert(folder / "hf", folder / "alone", "megatron")
    assert (folder / "alone/latest_checkpointed_iteration.txt").read_text() == "release"
    assert (folder / "alone/release/common.pt").is_file()
    result = convert(folder / "alone", folder / "again", "hf")
    assert result.state.moments == {}


def test_a_checkpoint_of_pytorch_has_no_class_of_megatron_and_a_metadata_json_of_others_is_none(tmp_path: Path) -> None:
    (tmp_path / ".metadata").write_bytes(b"cmegatron.core.dist_checkpointing.strategies.torch\nMCoreMetadata\n.")
    with pytest.raises(InputError, match=r"\.metadata needs megatron\.core"):
        read_dcp(tmp_path)
    (tmp_path / "metadata.json").write_text('{"license": "mit"}')
    assert step_folder(tmp_path) is None


def test_models_whose_names_in_megatron_are_unknown_are_refused(saved: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"Megatron's names are known for llama, .*its architecture is gpt2"):
        convert(saved, tmp_path / "moved", "hf", model="gpt2")


def run_megatron(
    folder: Path, spec: ModelSpec, tokens: Path, sizes: Mapping[str, Any], start: Path | None, save: Path
) -> dict[int, float]:
    """Train with megatron-core; step -> loss. `sizes`: tp, pp, ranks, sharding, and more keys of the job."""
    folder.mkdir()
    config = dict(
        num_layers=spec.n_layers, hidden_size=spec.d_model, num_attention_heads=spec.n_heads, kv_channels=spec.head_dim,
        num_query_groups=spec.n_kv_heads, ffn_hidden_size=spec.d_ffn, layernorm_epsilon=spec.norm_eps,
        qk_layernorm=spec.qk_norm,
    )  # fmt: skip
    if spec.moe is not None:
        config |= dict(
            num_moe_experts=spec.moe.n_experts, moe_router_topk=spec.moe.top_k, moe_ffn_hidden_size=spec.moe.d_ffn,
            moe_token_dispatcher_type="allgather", moe_router_load_balancing_type="none",
        )  # fmt: skip
    job = {
        "config": config,
        "model": {
            "vocab_size": spec.vocab_size,
            "max_sequence_length": spec.max_seq_len,
            "rotary_base": int(spec.rope_theta),
            "share_embeddings_and_output_weights": spec.tied_embedding,
        },
        "start": None if start is None else str(start),
        "save": {str(STEP): str(save)},
        "rates": [plain_rate(step, "cosine") for step in range(1, plain_loop.STEPS + 2)],
        "weight_decay": plain_loop.WEIGHT_DECAY,
        "betas": [plain_loop.BETA1, plain_loop.BETA2],
        "eps": plain_loop.EPS,
        "clip_norm": plain_loop.CLIP_NORM,
        "samples": plain_loop.GLOBAL_BATCH,
        "length": plain_loop.SEQ_LEN,
    }
    (folder / "job.json").write_text(json.dumps(job | dict(sizes)))
    torch.save([*batches(tokens)], folder / "batches.pt")
    program = Path(__file__).with_name("megatron_loop.py")
    assert LIBRARY is not None
    arguments = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(sizes["ranks"])]
    environment = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "TORCHDYNAMO_DISABLE": "1"}
    # The folder of this file has modules with the names of libraries.
    shutil.copy(Path(trainers.__file__).with_name("megatron_cpu.py"), folder)
    imported = folder / "shardwright/system"  # of this package it imports one file, which imports only torch
    imported.mkdir(parents=True)
    shutil.copy(torch_private.__file__, imported)
    environment["PYTHONPATH"] = str(folder)
    result = subprocess.run(
        [LIBRARY, *arguments, str(program), str(folder)],
        env=os.environ | environment, capture_output=True, text=True, timeout=600,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr[-3000:]
    return {int(step): loss for step, loss in json.loads((folder / "losses.json").read_text()).items()}


ONE: dict[str, Any] = {"tp": 1, "pp": 1, "ranks": 1, "sharding": None}
DATA: dict[str, Any] = {"tp": 1, "pp": 1, "ranks": 2, "sharding": "fully_reshardable"}
GRID: dict[str, Any] = {"tp": 2, "pp": 2, "ranks": 4, "sharding": "fully_reshardable"}
SINGLE = {"metadata": {"singleton_local_shards": True}}


@pytest.mark.skipif(LIBRARY is None, reason="MEGATRON_PYTHON names no interpreter with megatron-core")
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(
    ("more", "first", "then"),
    [
        ("", ONE, GRID),
        ("", DATA | SINGLE, DATA),
        ("", GRID, DATA),
        (MIXTURE, DATA | {"ep": 2}, DATA | {"ep": 2}),
        (MIXTURE, DATA | SINGLE | {"ep": 2}, DATA | {"ep": 2}),
    ],
)
def test_a_run_of_megatron_continues_here_and_back_there_with_the_losses_of_an_uninterrupted_run(
    tmp_path: Path, ragged_tokens: Path, more: str, first: Mapping[str, Any], then: Mapping[str, Any]
) -> None:
    run_file = write_run_file(tmp_path, ragged_tokens, more)
    spec, step = load(run_file).model.spec(), tmp_path / f"saved/iter_{STEP:07d}"
    expected = run_megatron(tmp_path / "there", spec, ragged_tokens, first, None, step)
    convert(tmp_path / "saved", tmp_path / "moved", "shardwright", run=run_file, prove=True)
    train(run_file, "--set", f"checkpoint.resume={tmp_path / 'moved'}", "--set", "layout.tp=2")
    here = {record["step"]: record["loss"] for record in records(run_file) if record["kind"] == "train"}
    assert here.keys() == set(range(STEP + 1, 12))
    assert all(abs(here[step] - expected[step]) <= TOLERANCE for step in here)
    convert(tmp_path / "out/checkpoints/step-00000009", tmp_path / "back", "megatron", prove=True)
    start = tmp_path / "back/iter_0000009"
    there = run_megatron(tmp_path / "again", spec, ragged_tokens, then, start, tmp_path / "unused")
    assert there.keys() == {10, 11}
    assert all(abs(there[step] - expected[step]) <= TOLERANCE for step in there)
