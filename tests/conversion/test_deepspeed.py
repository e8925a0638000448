"""DeepSpeed's checkpoints. With the library itself, in an environment of its own (pip install torch==2.13.0 deepspeed
transformers), about 2 minutes:

DEEPSPEED_PYTHON=/tmp/ds-env/bin/python pytest tests/conversion/test_deepspeed.py
"""

import json
import os
import resource
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from shardwright.config import load
from shardwright.conversion.deepspeed import DeepSpeedFolder, step_folder
from shardwright.conversion.formats import convert
from shardwright.model.spec import ModelSpec
from shardwright.system.errors import FullError, InputError
from tests.conversion import torchtitan_loop
from tests.conversion.test_convert import Intruder
from tests.conversion.torchtitan_loop import batches
from tests.conversion.zero_files import KINDS, STEP, random_values, under_their_names, write_zero
from tests.mutation import mutated
from tests.training import plain_loop
from tests.training.bugs.deepspeed import FILES as BUGS
from tests.training.plain_loop import plain_rate
from tests.training.runs import records, train

TOLERANCE = 5e-6  # of losses near 5.5 in float32, whose units there are 4.8e-7
LIBRARY = os.environ.get("DEEPSPEED_PYTHON")


@pytest.fixture
def run_file(ragged_tokens: Path, tmp_path: Path) -> Path:
    path = tmp_path / "run.toml"
    data = f'data = {{ path = "{ragged_tokens}", sequences = "documents" }}'
    rest = torchtitan_loop.RUN_FILE.replace("fp64", "fp32")
    path.write_text(f'out = "{tmp_path / "out"}"\n{data}\n{rest}checkpoint = {{ every = 3, keep_last = 9 }}\n')
    return path


@pytest.fixture
def spec(run_file: Path) -> ModelSpec:
    return load(run_file).model.spec()


def contents(folder: Path) -> dict[str, dict[str, Tensor]]:
    """Weights and moments, by kind and name, as this package reads them."""
    opened = DeepSpeedFolder(step_folder(folder) or folder)
    result: dict[str, dict[str, Tensor]] = {kind: {} for kind in KINDS}
    for place, record in opened.tensors.items():
        name, kind = place, "fp32"
        if place.startswith("optimizer.state."):
            name, kind = place.removeprefix("optimizer.state.").rsplit(".", 1)
        result[kind][name] = opened.read_shard(place, record.shards[0])
    return result


def equal(one: dict[str, dict[str, Tensor]], other: dict[str, dict[str, Tensor]]) -> bool:
    return all(
        one[kind].keys() == other[kind].keys() and all(torch.equal(one[kind][n], other[kind][n]) for n in one[kind])
        for kind in KINDS
    )


def convert_to_universal(folder: Path, spec: ModelSpec, run_file: Path, stage: int, n_ranks: int) -> bool:
    """Whether a checkpoint of ZeRO has its bits after it has been converted to ours and to a universal checkpoint."""
    values = random_values(spec)
    write_zero(folder / "zero", values, stage, n_ranks)
    convert(folder / "zero", folder / "own", "shardwright", run=run_file)
    convert(folder / "own", folder / "universal", "deepspeed-universal")
    return equal(values, contents(folder / "universal"))


@pytest.mark.parametrize(("stage", "n_ranks"), [(2, 2), (2, 3), (3, 1), (3, 3)])
def test_a_checkpoint_of_zero_has_the_same_bits_in_ours_and_in_a_universal_checkpoint(
    tmp_path: Path, run_file: Path, spec: ModelSpec, stage: int, n_ranks: int
) -> None:
    assert convert_to_universal(tmp_path, spec, run_file, stage, n_ranks)


@pytest.mark.prove
@pytest.mark.parametrize("name", BUGS)
def test_a_bug_of_reading_or_writing_deepspeed_changes_bits(
    tmp_path: Path, run_file: Path, spec: ModelSpec, name: str
) -> None:
    results = []
    with mutated(*BUGS[name].mutations):
        for stage in (2, 3):
            try:
                results.append(convert_to_universal(tmp_path / str(stage), spec, run_file, stage, 3))
            except InputError:
                results.append(False)
    assert not all(results)


@pytest.mark.prove
def test_a_universal_checkpoint_is_proven_and_the_groups_are_described(
    tmp_path: Path, run_file: Path, spec: ModelSpec
) -> None:
    write_zero(tmp_path / "zero", random_values(spec), 3, 2)
    remarks = convert(
        tmp_path / "zero", tmp_path / "universal", "deepspeed-universal", run=run_file, prove=True
    ).remarks
    assert len([each for each in remarks if each.startswith("proved: ")]) == 5
    assert any("16 with weight_decay=0.3, then 5 with weight_decay=0" in each for each in remarks)
    assert any("ZeRO-3 gives all groups the settings of the first" in each for each in remarks)


def _change(folder: Path, name: str, change: Callable[[dict], None]) -> None:
    path = folder / f"global_step{STEP}" / name
    content = torch.load(path, weights_only=False)
    change(content)
    torch.save(content, path)


def leave_out_rank(folder: Path) -> None:
    (folder / "global_step5/zero_pp_rank_1_mp_rank_00_optim_states.pt").unlink()


def leave_out_model(folder: Path) -> None:
    (folder / "global_step5/mp_rank_00_model_states.pt").unlink()


def cut_file(folder: Path) -> None:
    path = folder / "global_step5/zero_pp_rank_1_mp_rank_00_optim_states.pt"
    path.write_bytes(path.read_bytes()[:-100])


def put_in_a_class(folder: Path) -> None:
    torch.save({"args": Intruder()}, folder / "global_step5/mp_rank_00_model_states.pt")


def count_on(folder: Path) -> None:
    _change(folder, "mp_rank_00_model_states.pt", lambda content: content.update(global_steps=6))


def change_world(folder: Path) -> None:
    _change(folder, "mp_rank_00_model_states.pt", lambda content: content.update(dp_world_size=1))


def freeze(folder: Path) -> None:
    frozen = {"frozen_param_shapes": {"lm_head.weight": (300, 16)}}
    _change(folder, "mp_rank_00_model_states.pt", lambda content: content.update(frozen))


def add_tensor_parallel(folder: Path) -> None:
    path = folder / "global_step5/mp_rank_00_model_states.pt"
    path.with_name("mp_rank_01_model_states.pt").write_bytes(path.read_bytes())


def leave_latest(folder: Path) -> None:
    (folder / "latest").write_text("../../elsewhere")


def link(name: str) -> Callable[[Path], None]:
    """A file of the checkpoint is a link out of it, to a file with the same content."""

    def damage(folder: Path) -> None:
        outside = folder.parent / "outside"
        (folder / name).rename(outside)
        (folder / name).symlink_to(outside)

    damage.__name__ = f"link {name}"
    return damage


def keep_an_older_universal(folder: Path) -> None:
    (folder / "latest_universal").write_text("global_step4_universal")


def empty_groups(folder: Path) -> None:
    path = folder / "global_step5/zero_pp_rank_0_mp_rank_00_optim_states.pt"
    with under_their_names():
        content = torch.load(path, weights_only=False)
        content["optimizer_state_dict"]["base_optimizer_state"]["param_groups"] = []
        torch.save(content, path)


def count_without_end(folder: Path) -> None:
    _change(folder, "mp_rank_00_model_states.pt", lambda content: content.update(global_steps=float("inf")))


def shape_in_words(folder: Path) -> None:
    def change(content: dict) -> None:
        content["param_shapes"][0]["lm_head.weight"] = ("many", "few")

    _change(folder, "mp_rank_00_model_states.pt", change)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (leave_out_rank, "zero_pp_rank_1_mp_rank_00_optim_states.pt is missing: copy the files of all 2 ranks"),
        (leave_out_model, "mp_rank_00_model_states.pt is missing"),
        (cut_file, "zero_pp_rank_1_mp_rank_00_optim_states.pt is damaged"),
        (put_in_a_class, "mp_rank_00_model_states.pt needs other classes .*posix.mkdir"),
        (count_on, "its parts are of different steps .*train_state.step=6"),
        (change_world, "zero_pp_rank_1_.* is of another run: dp_world_size=1"),
        (freeze, r"has frozen parameters \(lm_head.weight\)"),
        (add_tensor_parallel, "mp_rank_01_model_states.pt: DeepSpeed wrote it with tensor or pipeline parallelism"),
        (leave_latest, "elsewhere"),
        (link("latest"), "'latest' is a link out of this folder"),
        (link("global_step5"), "'global_step5' is a link out of this folder"),
        (link("global_step5/mp_rank_00_model_states.pt"), "'mp_rank_00_model_states.pt' is a link out of this folder"),
        (
            keep_an_older_universal,
            "'global_step4_universal', and latest says 'global_step5'.*name one of these folders",
        ),
        (empty_groups, "rank_0_mp_rank_00_optim_states.pt: .*param_groups=.*: list should have at least 1 item"),
        (count_without_end, "mp_rank_00_model_states.pt: global_steps=inf: input should be a valid integer"),
        (shape_in_words, "param_shapes.0.lm_head.weight.0='many': input should be a valid integer"),
    ],
)
def test_a_damaged_checkpoint_of_zero_is_refused_and_nothing_is_written(
    tmp_path: Path,
    run_file: Path,
    spec: ModelSpec,
    damage: Callable[[Path], None],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    write_zero(tmp_path / "zero", random_values(spec), 2, 2)
    damage(tmp_path / "zero")
    monkeypatch.chdir(tmp_path)
    before = sorted(path.name for path in tmp_path.iterdir())
    with pytest.raises(InputError, match=message):
        convert(tmp_path / "zero", tmp_path / "moved", "shardwright", run=run_file)
    assert sorted(path.name for path in tmp_path.iterdir()) == before


@pytest.mark.parametrize(
    "name", ["zero", "zero/lm_head.weight", "zero/optimizer_state.pt", "zero/lm_head.weight/fp32.pt"]
)
def test_links_out_of_a_universal_checkpoint_are_refused_and_a_typed_link_to_a_step_is_followed(
    tmp_path: Path, run_file: Path, spec: ModelSpec, name: str
) -> None:
    values = random_values(spec)
    write_zero(tmp_path / "zero", values, 2, 1)
    convert(tmp_path / "zero", tmp_path / "own", "shardwright", run=run_file)
    convert(tmp_path / "own", tmp_path / "universal", "deepspeed-universal")
    (tmp_path / "typed").symlink_to(tmp_path / "universal/global_step5")
    assert equal(values, contents(tmp_path / "typed"))
    link(f"global_step5/{name}")(tmp_path / "universal")
    with pytest.raises(InputError, match="is a link out of this folder"):
        contents(tmp_path / "universal")


def test_a_universal_checkpoint_of_the_latest_step_is_read_first(tmp_path: Path, spec: ModelSpec) -> None:
    write_zero(tmp_path, random_values(spec), 2, 1)
    (tmp_path / "latest_universal").write_text("global_step5_universal")
    (tmp_path / "global_step5_universal/zero").mkdir(parents=True)
    assert step_folder(tmp_path) == tmp_path / "global_step5_universal"


def test_bf16_optimizer_has_no_stage_in_its_files(tmp_path: Path, spec: ModelSpec) -> None:
    values = random_values(spec)
    write_zero(tmp_path, values, 1, 2, bf16=True)
    assert equal(values, contents(tmp_path))


ADAM, ASSUMED = {"type": "Adam", "params": {}}, ["AdamW is assumed"]


@pytest.mark.parametrize("universal", [False, True])
@pytest.mark.parametrize(
    ("config", "remarks"),
    [
        ({"optimizer": ADAM}, ASSUMED),
        ("ds.json", ASSUMED),
        ({"optimizer": {**ADAM, "type": "AdamW"}}, []),
        ({"optimizer": {**ADAM, "params": {"adam_w_mode": True}}}, []),
        ({"optimizer": {**ADAM, "params": {"adam_w_mode": False}}}, None),
    ],
)
def test_adam_without_decoupled_decay_is_refused_and_an_assumption_is_reported(
    tmp_path: Path, run_file: Path, spec: ModelSpec, universal: bool, config: Any, remarks: list[str] | None
) -> None:
    write_zero(tmp_path / "zero", random_values(spec), 2, 1, None if universal else config)
    source = tmp_path / "zero"
    if universal:
        convert(tmp_path / "zero", tmp_path / "own", "shardwright", run=run_file)
        source = tmp_path / "universal"
        convert(tmp_path / "own", source, "deepspeed-universal")
        _change(source, "mp_rank_00_model_states.pt", lambda content: content.update(ds_config=config))
    if remarks is None:
        with pytest.raises(InputError, match="adam_w_mode=False; supported: True"):
            convert(source, tmp_path / "moved", "shardwright", run=run_file)
        return
    said = convert(source, tmp_path / "moved", "shardwright", run=run_file).remarks
    assert [part for part in ASSUMED if any(part in line for line in said)] == remarks


def test_a_full_disk_ends_with_a_sentence_and_no_folder(tmp_path: Path, run_file: Path, spec: ModelSpec) -> None:
    write_zero(tmp_path / "zero", random_values(spec), 2, 1)
    convert(tmp_path / "zero", tmp_path / "own", "shardwright", run=run_file)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (9000, limits[1]))  # smaller than the embedding
    try:
        with pytest.raises(FullError, match="universal: no room to write it"):
            convert(tmp_path / "own", tmp_path / "universal", "deepspeed-universal")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert not [*tmp_path.glob("universal*")]


def add_state(state: dict[str, Tensor]) -> None:
    state["momentum_buffer"] = torch.zeros_like(state["exp_avg"])


def go_back(state: dict[str, Tensor]) -> None:
    state["step"] = torch.tensor(STEP - 1.0)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (add_state, "the optimizer has states momentum_buffer .*supported: AdamW"),
        (go_back, "its parts are of different steps .*rank_1_.*: 4.*rank_0_.*: 5"),
    ],
)
def test_states_of_another_optimizer_or_step_are_refused(
    tmp_path: Path, run_file: Path, spec: ModelSpec, change: Callable[[dict[str, Tensor]], None], message: str
) -> None:
    write_zero(tmp_path / "zero", random_values(spec), 2, 2)
    for rank in (1,) if change is go_back else (0, 1):
        path = tmp_path / f"zero/global_step5/zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"
        with under_their_names():
            content = torch.load(path, weights_only=False)
            for state in content["optimizer_state_dict"]["base_optimizer_state"]["state"].values():
                change(state)
            torch.save(content, path)
    with pytest.raises(InputError, match=message):
        convert(tmp_path / "zero", tmp_path / "moved", "shardwright", run=run_file)


def test_weights_alone_and_float64_have_no_place_in_a_universal_checkpoint(
    tmp_path: Path, run_file: Path, spec: ModelSpec
) -> None:
    write_zero(tmp_path / "zero", random_values(spec), 2, 1)
    convert(tmp_path / "zero", tmp_path / "hf", "hf", run=run_file)
    with pytest.raises(InputError, match="a universal checkpoint needs one; DeepSpeed starts from --to hf"):
        convert(tmp_path / "hf", tmp_path / "universal", "deepspeed-universal")


def run_library(*arguments: object) -> None:
    """Run the interpreter that has DeepSpeed, with a folder of its own for what it compiles."""
    assert LIBRARY is not None
    binaries = Path(LIBRARY).parent
    environment = {
        "DS_ACCELERATOR": "cpu",
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "PATH": f"{binaries}:{os.environ['PATH']}",
        "TORCH_EXTENSIONS_DIR": str(binaries.parent / "torch_extensions"),
    }
    result = subprocess.run(
        [LIBRARY, *map(str, arguments)], env=os.environ | environment, capture_output=True, text=True
    )
    assert result.returncode == 0, result.stderr[-3000:]


def run_deepspeed(folder: Path, tokens: Path, stage: int, n_ranks: int, start: Path | None, save: Path) -> dict:
    """Train with DeepSpeed; step -> loss."""
    loop = torchtitan_loop
    folder.mkdir()
    config = dict(
        hidden_size=loop.WIDTH, num_hidden_layers=loop.LAYERS, num_attention_heads=loop.HEADS,
        num_key_value_heads=loop.KV_HEADS, head_dim=loop.HEAD, intermediate_size=loop.FFN, vocab_size=loop.VOCABULARY,
        rope_theta=loop.THETA, rms_norm_eps=loop.NORM_EPS, max_position_embeddings=plain_loop.SEQ_LEN,
        tie_word_embeddings=False,
    )  # fmt: skip
    job = {
        "stage": stage,
        "config": config,
        "start": None if start is None else str(start),
        "save": {str(STEP): str(save)},
        "rates": [plain_rate(step, "cosine") for step in range(1, plain_loop.STEPS + 2)],
        "weight_decay": plain_loop.WEIGHT_DECAY,
        "betas": [plain_loop.BETA1, plain_loop.BETA2],
        "eps": plain_loop.EPS,
        "clip_norm": plain_loop.CLIP_NORM,
        "samples": plain_loop.GLOBAL_BATCH,
    }
    (folder / "job.json").write_text(json.dumps(job))
    torch.save([*batches(tokens)], folder / "batches.pt")
    program = Path(__file__).with_name("deepspeed_loop.py")
    run_library("-m", "torch.distributed.run", "--standalone", "--nproc_per_node", n_ranks, program, folder)
    return {int(step): loss for step, loss in json.loads((folder / "losses.json").read_text()).items()}


@pytest.mark.skipif(LIBRARY is None, reason="DEEPSPEED_PYTHON names no interpreter with deepspeed")
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(("stage", "n_ranks"), [(1, 2), (2, 4), (3, 4)])
def test_a_run_of_deepspeed_continues_here_and_back_there_with_the_losses_of_an_uninterrupted_run(
    tmp_path: Path, run_file: Path, ragged_tokens: Path, stage: int, n_ranks: int
) -> None:
    expected = run_deepspeed(tmp_path / "there", ragged_tokens, stage, n_ranks, None, tmp_path / "saved")
    universal = tmp_path / f"by_library/global_step{STEP}"
    folders = ["--input_folder", tmp_path / f"saved/global_step{STEP}", "--output_folder", universal]
    run_library("-m", "deepspeed.checkpoint.ds_to_universal", "--inject_missing_state", *folders)
    assert equal(contents(tmp_path / "saved"), contents(universal))
    convert(tmp_path / "saved", tmp_path / "moved", "shardwright", run=run_file, prove=True)
    train(run_file, "--set", f"checkpoint.resume={tmp_path / 'moved'}", "--set", "layout.tp=2")
    here = {record["step"]: record["loss"] for record in records(run_file) if record["kind"] == "train"}
    assert here.keys() == set(range(STEP + 1, 12))
    assert all(abs(here[step] - expected[step]) <= TOLERANCE for step in here)
    convert(tmp_path / "out/checkpoints/step-00000009", tmp_path / "back", "deepspeed-universal", prove=True)
    there = run_deepspeed(tmp_path / "again", ragged_tokens, stage, 2, tmp_path / "back", tmp_path / "unused")
    assert there.keys() == {10, 11}
    assert all(abs(there[step] - expected[step]) <= TOLERANCE for step in there)
