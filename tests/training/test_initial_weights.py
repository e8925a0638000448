"""Proves that a run begins with exactly the weights that it is given, on every layout, whatever holds them, and that
what goes out again is the same bytes from every layout."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

from shardwright.config import parse, resolved_toml, table_of
from shardwright.config.sections import InitSection
from shardwright.data.samples import IGNORE
from shardwright.layout.layout import Layout
from shardwright.model.transformer import Transformer
from shardwright.split.rules import problems
from shardwright.system.errors import CheckpointError
from shardwright.training.checkpoint.manifest import TrainingProgress
from shardwright.training.checkpoint.saver import save
from shardwright.training.checkpoint.state import load
from shardwright.training.checkpoint.store import CheckpointStore
from shardwright.training.exporting import export
from shardwright.training.importing import import_weights
from shardwright.training.initial_weights import begin_with
from shardwright.training.optimizer import named_state
from shardwright.training.weights import open_weights
from shardwright.verification.rank import build_trainer, local_batch
from tests.distributed import run_ranks
from tests.hugging_face.models import FAMILIES, kept, saved, tensors, their_logits
from tests.marks import prove, rest_prove
from tests.training.checkpoints import DATA, hop
from tests.training.worlds import CASE, RATE, SPEC, whole

TWO = {
    "zero 3": Layout(dp_shard=2, zero=3),
    "tp": Layout(tp=2, sequence_parallel=False),
    "sp": Layout(tp=2, sequence_parallel=True),
    "cp": Layout(cp=2),
    "pp": Layout(pp=2),
}
FOUR = {
    "tp x pp": Layout(tp=2, pp=2, sequence_parallel=True),
    "zero 3 x tp": Layout(dp_shard=2, zero=3, tp=2, sequence_parallel=True),
    "zero 3 x pp": Layout(dp_shard=2, zero=3, pp=2),
    "one kv head for two ranks": Layout(tp=4, sequence_parallel=True),
}
EXPERTS = {
    "ep": Layout(dp_shard=2, zero=3, ep=2),
    "ep over tp": Layout(tp=2, sequence_parallel=True, ep=2),
    "pp": Layout(pp=2),
}
CASES = [
    *(("llama", name, layout) for name, layout in (TWO | FOUR).items()),
    *(("gpt2", name, (TWO | FOUR)[name]) for name in ("sp", "zero 3 x pp")),
    *(("mixtral", name, layout) for name, layout in EXPERTS.items()),
    *((family, "ep over tp", EXPERTS["ep over tp"]) for family in ("qwen3-moe", "deepseek-v3")),
]


def case_of(path: Path, layout: Layout):
    """Two micro-batches a step of the model at a path, in float64."""
    return replace(
        CASE,
        spec=open_weights(path).spec,
        seq_len=16,
        global_batch=8,
        micro_batch=4 // layout.data_ranks,
        dtype="float64",
    )


def start(path: Path, layout: Layout, folder: Path | None = None) -> tuple[float, bool]:
    """To be run on every rank: begin with the weights at a path; the first loss, and whether every parameter is exactly
    what is there. Saves a checkpoint of the start in `folder`."""
    case = case_of(path, layout)
    trainer = build_trainer(case, layout, "adamw")
    begin_with(trainer, InitSection(weights=str(path)))
    weights = open_weights(path)
    equal = all(
        torch.equal(whole(parameter), weights.read(name, (0,) * parameter.dim(), parameter.shape).double())
        for name, parameter in trainer.model.named_parameters.items()
        if name in weights.shapes
    )
    if folder is not None:
        table = {"out": str(folder), "steps": 1, "data": {"path": "none"}, "batch": {"seq_len": 16, "global_batch": 8}}
        text = resolved_toml(parse(table | {"model": {"from": str(path)}}))
        save(CheckpointStore(folder), trainer, TrainingProgress(1, 8, case.seed), DATA, text)
    loss_part, *_ = trainer.forward_backward(local_batch(case, layout, dist.get_rank(), 0), 0)
    return float(trainer.model.sum_over_losses(loss_part)), equal


def their_loss(path: Path) -> float:
    """The loss of `transformers` on the same batch, in float64."""
    tokens_BT, targets_BT, _ = case_of(path, Layout()).batch(0)
    logits_BTV = their_logits(path, torch.float64, tokens_BT)
    return float(F.cross_entropy(logits_BTV.flatten(0, 1), targets_BT.flatten(), ignore_index=IGNORE))


@pytest.mark.parametrize(("family", "name", "layout"), rest_prove(CASES))
def test_the_first_loss_is_that_of_transformers(family: str, name: str, layout: Layout, tmp_path: Path):
    check_start(family, layout, tmp_path)


def check_start(family: str, layout: Layout, folder: Path) -> None:
    source = saved(folder / "hf", FAMILIES[family])
    for loss, equal in run_ranks(start, layout.world_size, source, layout):
        assert equal
        assert loss == pytest.approx(their_loss(source), rel=1e-12)


@prove
@pytest.mark.parametrize(
    ("family", "layout"),
    [
        *(("llama", layout) for layout in (Layout(), TWO["zero 3"], *FOUR.values())),
        ("mixtral", EXPERTS["ep over tp"]),
    ],
)
def test_an_export_is_the_same_bytes_from_every_layout(family: str, layout: Layout, tmp_path: Path):
    source = saved(tmp_path / "hf", FAMILIES[family])
    import_weights(source, tmp_path / "weights")
    run_ranks(start, layout.world_size, tmp_path / "weights", layout, tmp_path / "checkpoints")
    export(source, tmp_path / "expected", dtype="bf16", max_shard_bytes=10_000)
    export(tmp_path / "checkpoints" / "step-00000001", tmp_path / "found", dtype="bf16", max_shard_bytes=10_000)
    names = {path.name for path in (tmp_path / "expected").iterdir()}
    assert len([name for name in names if name.endswith(".safetensors")]) > 1
    for name in names - {"README.md", "config.json", "generation_config.json"}:
        assert (tmp_path / "found" / name).read_bytes() == (tmp_path / "expected" / name).read_bytes(), name
    assert open_weights(tmp_path / "found").spec == open_weights(source).spec


NEWER = (
    "llama4", "gpt-oss", "gemma2", "gemma3", "cohere2", "ministral", "smollm3, biases", "qwen2-moe", "qwen3-next",
    "granite-moe", "phi3, windows", "starcoder2", "glm4", "deepseek-v2",
)  # fmt: skip
"""Families of each kind of table; the layouts of a world take turns."""


def save_starts(starts: list[tuple[str, Layout, Path]]) -> None:
    """To be run on every rank: begin with the weights of each path, and save a checkpoint in its folder."""
    for path, layout, folder in starts:
        trainer = build_trainer(case_of(Path(path), layout), layout, "sgd")
        begin_with(trainer, InitSection(weights=path))
        table = {"out": str(folder), "steps": 1, "data": {"path": "none"}, "batch": {"seq_len": 16, "global_batch": 8}}
        text = resolved_toml(parse(table | {"model": {"from": path}}))
        save(CheckpointStore(folder), trainer, TrainingProgress(1, 8, 0), DATA, text)


@prove
@pytest.mark.parametrize("layouts", [[*TWO.values(), EXPERTS["ep over tp"]], [*FOUR.values()]], ids=["2", "4"])
def test_every_family_comes_in_and_goes_out_bit_for_bit_over_layouts(layouts: list[Layout], tmp_path: Path):
    starts: list[tuple[str, Layout, Path]] = []
    for family in NEWER if len(layouts) > 4 else NEWER[::3]:
        taken = [layout for _, layout, _ in starts]
        possible = [each for each in layouts if not problems(open_weights(kept(family)).spec, each, 16)]
        starts.append((str(kept(family)), min(possible, key=taken.count), tmp_path / family))
    assert {str(layout) for _, layout, _ in starts} == set(map(str, layouts))
    run_ranks(save_starts, layouts[0].world_size, starts)
    for source, _, folder in starts:
        model_type = json.loads((Path(source) / "config.json").read_text())["model_type"]
        out = folder / "out"
        export(folder / "step-00000001", out, dtype="fp32", architecture=model_type)
        expected, found = tensors(Path(source)), tensors(out)
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], tensor) for name, tensor in expected.items()), source


ODD = replace(SPEC, n_heads=4, n_kv_heads=2, qk_norm=True, vocab_size=61, d_ffn=42)
"""Of 61 rows 2 ranks have 31 and 30, and 3 ranks of each 11, 11, 9 and 10, 10, 10; 4 ranks have 16, 16, 16 and 13."""
UNEQUAL = [Layout(dp_shard=3, tp=2, zero=3, sequence_parallel=True), Layout(dp_shard=4, zero=3)]


@prove
def test_a_layout_with_unequal_shards_is_saved_resumed_and_exported_to_what_transformers_computes(tmp_path: Path):
    """The other side is a plain model with the weights that the ranks hold in the end."""
    model = table_of(ODD)
    table = {"out": str(tmp_path), "steps": 2, "model": model, "data": {"path": "none"}}
    text = resolved_toml(parse(table | {"batch": {"seq_len": 16, "global_batch": 8}}))
    for step, layout in enumerate(UNEQUAL):
        outcomes = run_ranks(hop, layout.world_size, tmp_path / "run", layout, step, ODD, (), text)
    weights = {name.removeprefix("model/"): each for name, each in outcomes[0][1].items() if name.startswith("model/")}
    plain = Transformer(ODD).eval()
    plain.load_state_dict(weights)
    export(tmp_path / "run" / "step-00000002", tmp_path / "hf")
    tokens_BT = torch.arange(24).view(2, 12)
    with torch.no_grad():
        torch.testing.assert_close(their_logits(tmp_path / "hf", torch.float32, tokens_BT), plain(tokens_BT))


def take_steps(folder: Path, layout: Layout, path: Path, optimizer: bool) -> dict[str, torch.Tensor]:
    """To be run on every rank: begin with a checkpoint, and say what of the optimizer there is then."""
    trainer = build_trainer(case_of(path, layout), layout, "adamw")
    begin_with(trainer, InitSection(weights=str(path), optimizer=optimizer))
    state = named_state(trainer.optimizer, trainer.model.named_parameters.items())
    return {name: whole(tensor) for name, tensor in state.items()}


def trained(path: Path, folder: Path) -> dict[str, torch.Tensor]:
    """To be run on one process: train two steps from the weights at a path, and save; the optimizer's state."""
    layout = Layout()
    case = case_of(path, layout)
    trainer = build_trainer(case, layout, "adamw")
    begin_with(trainer, InitSection(weights=str(path)))
    for step in range(2):
        trainer.forward_backward(local_batch(case, layout, 0, step), step)
        trainer.update(RATE)
    table = {"out": str(folder), "steps": 2, "data": {"path": "none"}, "batch": {"seq_len": 16, "global_batch": 8}}
    text = resolved_toml(parse(table | {"model": {"from": str(path)}}))
    save(CheckpointStore(folder), trainer, TrainingProgress(2, 16, case.seed), DATA, text)
    return {n: whole(t) for n, t in named_state(trainer.optimizer, trainer.model.named_parameters.items()).items()}


@prove
def test_the_moments_are_kept_when_asked_for_and_zero_otherwise(tmp_path: Path):
    source = saved(tmp_path / "hf", FAMILIES["llama"])
    [expected] = run_ranks(trained, 1, source, tmp_path / "checkpoints")
    path = tmp_path / "checkpoints" / "step-00000002"
    for optimizer in (True, False):
        for found in run_ranks(take_steps, 2, tmp_path, TWO["zero 3"], path, optimizer):
            assert found.keys() == expected.keys()
            for name, tensor in expected.items():
                assert torch.equal(found[name], tensor if optimizer else torch.zeros_like(tensor)), name


def refusals(path: Path, optimizer: bool) -> list[str]:
    """To be run on one process: why a run of another model cannot begin with the weights, and why it cannot resume."""
    case = case_of(path, Layout())
    spec = replace(case.spec, n_layers=1, max_seq_len=1024, rope_theta=5e5, dropout=0.1)
    trainer = build_trainer(replace(case, spec=spec), Layout(), "adamw")
    found = []
    with pytest.raises(CheckpointError) as caught:
        begin_with(trainer, InitSection(weights=str(path), optimizer=optimizer))
    found.append(str(caught.value))
    with pytest.raises(CheckpointError) as caught:
        load(path, trainer, DATA)
    return [*found, str(caught.value)]


def test_another_model_is_refused_and_a_resume_names_the_way(tmp_path: Path):
    source = saved(tmp_path / "hf", FAMILIES["llama"])
    import_weights(source, tmp_path / "weights")
    [[started, resumed]] = run_ranks(refusals, 1, tmp_path / "weights", True)
    assert started.splitlines()[0].startswith("model.n_layers=1 contradicts init.weights=")
    assert len(started.splitlines()) == 1  # longer sequences, another base and dropout are no contradiction
    assert "it is of another model: n_layers=2" in resumed
    assert "--set init.weights=PATH, a new --set out=... and no --resume" in resumed


def test_a_bit_that_has_changed_is_noticed(tmp_path: Path):
    import_weights(saved(tmp_path / "hf", FAMILIES["llama"]), tmp_path / "weights")
    path = tmp_path / "weights" / "weights-00001.safetensors"
    content = bytearray(path.read_bytes())
    content[-3] ^= 1
    path.write_bytes(content)
    weights = open_weights(tmp_path / "weights")
    with pytest.raises(CheckpointError, match="do not have the xxh3_128"):
        weights.read("norm.weight", (0,), (32,))
