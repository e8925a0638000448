"""Proves that adapters train on every layout as in one process, in float64, and that the base weights stay as they are.

`verify` begins with a B that is not zero: with the zeros of a run, no gradient would depend on A or on B's sharding.
"""

import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from shardwright.config import RunConfig, parse, resolved_toml
from shardwright.conversion.own import read_own_state
from shardwright.layout.layout import Layout
from shardwright.model.init import initialise
from shardwright.model.lora_sizes import LoraSpec
from shardwright.model.sections import MoESpec
from shardwright.model.spec import ModelSpec
from shardwright.model.transformer import Transformer
from shardwright.runs.folder import CHECKPOINTS, checkpoint_name
from shardwright.split.rules import problems
from shardwright.system.errors import CheckpointError, ConfigError, InputError
from shardwright.training.base_weights import base_record, fill_base
from shardwright.training.build import build_model, build_trainer
from shardwright.training.checkpoint.manifest import TrainingProgress, read_manifest
from shardwright.training.checkpoint.saver import save
from shardwright.training.checkpoint.state import load
from shardwright.training.checkpoint.store import CheckpointStore
from shardwright.training.importing import import_weights, write_weights_folder
from shardwright.training.initial_weights import initial_weights_problems
from shardwright.training.merging import merge
from shardwright.training.step import Trainer
from shardwright.training.weights import AdaptedWeights, open_weights
from shardwright.verification import Case, Verifier
from shardwright.verification.case import ADAPTER_STD
from tests.distributed import run_ranks
from tests.hugging_face.models import FAMILIES, saved
from tests.marks import prove, rest_prove
from tests.training.bugs.bug import EXPERTS, LATENT
from tests.training.checkpoints import DATA, Logical, equal, hop
from tests.training.test_switches import (
    BIASED_BOTH,
    COHERE,
    DEEPSEEK_V2,
    DENSE,
    EVERY_SECOND,
    LINEAR,
    LLAMA4,
    OFFSET,
    STARCODER,
    WINDOWS,
)
from tests.training.worlds import CASE, EVEN, LONG, SPEC, whole

LORA = LoraSpec(rank=3, alpha=6.0)
LAYOUTS = {
    "tp": Layout(tp=2, sequence_parallel=False),
    "sp": Layout(tp=2, sequence_parallel=True),
    "zero 3": Layout(dp_shard=2, zero=3),
    "pp": Layout(pp=2, pp_schedule="zb-h1"),
    "one rank": Layout(),
    "zero 0": Layout(dp_replicate=2),
    "zero 1": Layout(dp_shard=2, zero=1),
    "zero 2, hybrid": Layout(dp_replicate=2, dp_shard=2, zero=2),
    "cp": Layout(cp=2),
    "ulysses": Layout(cp=2, cp_method="ulysses"),
    "kv heads on two ranks": Layout(tp=4, sequence_parallel=True),
    "zero 3 of sp": Layout(tp=2, sequence_parallel=True, dp_shard=2, zero=3),
    "pp of sp": Layout(tp=2, sequence_parallel=True, pp=2, pp_schedule="1f1b"),
    "dualpipe": Layout(pp=2, pp_schedule="dualpipe"),
    "recompute": Layout(recompute="full"),
    "recompute of sp": Layout(tp=2, sequence_parallel=True, recompute="full"),
    "selective recompute": Layout(recompute="selective"),
    "parameters on the host": Layout(dp_shard=2, zero=3, offload_parameters="cpu", offload_optimizer="cpu"),
    "optimizer on the host": Layout(offload_optimizer="cpu"),
    "activations on the host": Layout(offload_activations="cpu"),
    "compressed": Layout(dp_replicate=2, compress_gradients="powersgd-2"),
}
QUICK = ("sp", "zero 3", "pp")


def case_of(layout: Layout, spec: ModelSpec | None = None, lora: LoraSpec = LORA) -> Case:
    base = CASE if layout.cp * layout.tp == 1 and spec is None else LONG
    accumulation = 4 if layout.pp > 1 else 3
    micro_batch = base.global_batch // (accumulation * layout.data_ranks)
    return replace(base, spec=replace(spec or base.spec, lora=lora), micro_batch=micro_batch)


@pytest.mark.parametrize("name", rest_prove(LAYOUTS, *QUICK))
def test_adapters_train_as_in_one_process(verifier: Verifier, name: str):
    report = verifier.parity(case_of(LAYOUTS[name]), LAYOUTS[name])
    assert report.equal, report.differing or report.worst
    assert report.worst_error < 1e-12, report.worst


@prove
@pytest.mark.parametrize(
    ("layout", "dtype"),
    [
        (Layout(), "bfloat16"),
        (Layout(dp_replicate=2), "bfloat16"),
        (Layout(dp_shard=2, zero=3), "bfloat16"),
        (Layout(dp_shard=2, zero=3), "float16"),
    ],
    ids=str,
)
def test_a_base_in_16_bits_trains_with_adapters_in_32(verifier: Verifier, layout: Layout, dtype: str):
    micro_batch = CASE.global_batch // (4 * layout.data_ranks)
    overflow = 1 if dtype == "float16" else None
    report = verifier.parity(
        replace(case_of(layout), micro_batch=micro_batch, dtype=dtype, overflow_step=overflow), layout
    )
    assert report.equal, report.differing or report.worst


@prove
@pytest.mark.parametrize(
    "layout",
    [
        Layout(dp_shard=2, zero=3, compress_gradients="int8"),
        Layout(dp_shard=2, zero=1, compress_gradients="int8"),
        Layout(tp=2, dp_shard=2, zero=3, compress_weights="int8"),
        Layout(dp_shard=2, zero=1, compress_weights="int8"),
    ],
    ids=str,
)
def test_adapters_train_with_integers_in_messages(verifier: Verifier, layout: Layout):
    report = verifier.parity(case_of(layout), layout)
    assert report.equal, report.differing or report.worst


SP, TP, ZERO_3 = LAYOUTS["sp"], LAYOUTS["tp"], LAYOUTS["zero 3"]
ZERO_BUBBLE = LAYOUTS["pp"]
LATENT_HEADS = {"latent_attention": LATENT, "n_kv_heads": 4}
OF_ATTENTION, OF_FFN = replace(LORA, targets=("attention",)), replace(LORA, targets=("ffn",))
OF_EXPERTS = replace(LORA, targets=("attention", "experts"))
ROUTED = {"moe": EXPERTS}
TP_EP = Layout(tp=2, sequence_parallel=True, ep=2)
TIED = {"mtp_modules": 1, "tied_embedding": True}
LAST_ROUTED = {"n_layers": 4, "moe": replace(EXPERTS, first_dense=2)}
"""With adapters of ffn, the last two layers have no adapter, and so with pp = 2 the second stage has none."""
MODELS: dict[str, tuple[dict[str, Any], Layout, LoraSpec]] = {
    "experts, tp, ep": (ROUTED, Layout(tp=2, sequence_parallel=True, ep=2), OF_ATTENTION),
    "experts, zero 2, ep": (ROUTED, Layout(dp_shard=2, zero=2, ep=2), OF_ATTENTION),
    "shared experts, zero 3, ep": (DENSE, Layout(dp_shard=4, zero=3, ep=2), LORA),
    "shared experts, tp, ep": (DENSE, Layout(tp=2, sequence_parallel=True, ep=2), LORA),
    "shared experts, replicas of kv heads, selective": (
        DENSE,
        Layout(tp=4, sequence_parallel=True, recompute="selective"),
        LORA,
    ),
    "shared experts, MTP, pp": (EVERY_SECOND, ZERO_BUBBLE, LORA),
    "biases of experts, pp, cp, ep, full": (BIASED_BOTH, Layout(pp=2, cp=2, ep=2, recompute="full"), LORA),
    "latent attention and shared experts, tp, ep": (DEEPSEEK_V2, Layout(tp=2, sequence_parallel=True, ep=2), LORA),
    "latent attention, tp": (LATENT_HEADS, TP, LORA),
    "latent attention, sp": (LATENT_HEADS, SP, LORA),
    "latent attention, kv_down alone, sp": (LATENT_HEADS, SP, replace(LORA, targets=("kv_down",))),
    "latent attention, zero 3": (LATENT_HEADS, ZERO_3, LORA),
    "latent attention, pp": (LATENT_HEADS, ZERO_BUBBLE, LORA),
    "MTP and a tied embedding, pp": (TIED, Layout(pp=2), LORA),
    "MTP and a tied embedding, dualpipe": (TIED | {"n_layers": 5}, LAYOUTS["dualpipe"], LORA),
    "MTP, sp": ({"mtp_modules": 2}, SP, LORA),
    "linear attention, tp": (LINEAR, TP, LORA),
    "linear attention, ring, tp": (LINEAR, Layout(cp=2, cp_method="ring", tp=2, sequence_parallel=False), LORA),
    "linear attention, ulysses, zero 3, pp": (
        LINEAR,
        Layout(cp=2, cp_method="ulysses", zero=3, pp=2, pp_schedule="zb-h1"),
        LORA,
    ),
    "windows, sinks, tp": (WINDOWS, TP, LORA),
    "windows, sinks, zigzag, full": (WINDOWS, Layout(cp=2, cp_method="zigzag", recompute="full"), LORA),
    "parallel branches, tp": (COHERE, TP, LORA),
    "parallel branches, sp, ring, full": (
        COHERE,
        Layout(tp=2, sequence_parallel=True, cp=2, cp_method="ring", recompute="full"),
        LORA,
    ),
    "parallel branches, ffn alone, sp": (COHERE, SP, OF_FFN),
    "biases, replicas of kv heads": (STARCODER, Layout(tp=4, sequence_parallel=True), LORA),
    "norms over all heads, replicas of kv heads, full": (
        OFFSET,
        Layout(tp=4, sequence_parallel=True, recompute="full"),
        LORA,
    ),
    "chunks and scaled experts, tp, ep": (LLAMA4, Layout(tp=2, sequence_parallel=True, ep=2), LORA),
    "of experts": (ROUTED, Layout(), OF_EXPERTS),
    "of experts, sp": (ROUTED, SP, OF_EXPERTS),
    "of experts, tp, ep, selective": (DENSE, TP_EP.changed(recompute="selective"), OF_EXPERTS),
    "of experts, zero 1, ep": (ROUTED, Layout(dp_shard=2, zero=1, ep=2), OF_EXPERTS),
    "of experts, hybrid zero 2, ep": (ROUTED, Layout(dp_replicate=2, dp_shard=2, zero=2, ep=2), OF_EXPERTS),
    "of an expert on each rank, zero 3, ep": (
        {"moe": replace(EXPERTS, n_experts=2, top_k=2)},
        Layout(dp_shard=4, zero=3, ep=2),
        replace(OF_EXPERTS, rank=4),
    ),
    "of experts, zero 3, tp, ep": (ROUTED, TP_EP.changed(dp_shard=2, zero=3), OF_EXPERTS),
    "of experts with biases, pp, cp, ep, full": (BIASED_BOTH, Layout(pp=2, cp=2, ep=2, recompute="full"), OF_EXPERTS),
    "of experts, zero bubble, ep": (
        ROUTED,
        Layout(pp=2, pp_schedule="zb-h1", dp_shard=2, zero=1, ep=2),
        OF_EXPERTS,
    ),
    "of experts, MTP, pp": (EVERY_SECOND, ZERO_BUBBLE, OF_EXPERTS),
    "of experts, all on the host, ep": (
        ROUTED,
        Layout(dp_shard=2, zero=3, ep=2, offload_parameters="cpu", offload_optimizer="cpu", offload_activations="cpu"),
        OF_EXPERTS,
    ),
    "of scaled experts, tp, ep": (LLAMA4, TP_EP, OF_EXPERTS),
    "of experts of a base in nf4, tp, ep": (ROUTED, TP_EP, replace(OF_EXPERTS, base="nf4")),
    "of experts of a base in int8, zero 3, ep": (
        ROUTED,
        Layout(dp_shard=2, zero=3, ep=2),
        replace(OF_EXPERTS, base="int8"),
    ),
    "no adapter in the last stage": (LAST_ROUTED, Layout(pp=2), OF_FFN),
    "no adapter in a stage, zero 3": (LAST_ROUTED, Layout(pp=2, dp_shard=2, zero=3), OF_FFN),
    "no adapter in a stage, zero 1, ep": (LAST_ROUTED, Layout(pp=2, dp_shard=2, zero=1, ep=2), OF_FFN),
    "no adapter in a stage, zero 0": (LAST_ROUTED, Layout(pp=2, dp_replicate=2), OF_FFN),
    "no adapter in a stage, on the host": (
        LAST_ROUTED,
        Layout(pp=2, dp_shard=2, zero=3, offload_parameters="cpu", offload_optimizer="cpu"),
        OF_FFN,
    ),
}


@pytest.mark.parametrize("name", rest_prove(MODELS, "no adapter in the last stage", "of experts, tp, ep, selective"))
def test_adapters_of_every_kind_of_model_train_as_in_one_process(verifier: Verifier, name: str):
    changes, layout, lora = MODELS[name]
    case = replace(case_of(layout, replace(EVEN, **changes), lora), steps=2)
    assert not case.spec.problems()
    assert not case.spec.lora_problems()
    report = verifier.parity(case, layout)
    assert report.equal, report.differing or report.worst
    assert report.worst_error < 1e-12, report.worst


def test_an_adapter_computes_as_the_sum_of_base_and_product():
    base = replace(EVEN, **DENSE)
    spec = replace(base, lora=replace(LORA, rslora=True, targets=("attention", "ffn", "experts")))
    adapted, merged = Transformer(spec).double(), Transformer(base).double()
    initialise(adapted, spec, 0, b_std=ADAPTER_STD)
    values, n_experts = dict(adapted.named_parameters()), 0
    with torch.no_grad():
        for name, parameter in merged.named_parameters():
            parameter.copy_(values[name])
            begin = name.removesuffix("weight") if name.endswith(".weight") else f"{name}_"
            if f"{begin}lora_a" in values:
                parameter.add_(6.0 / 3**0.5 * values[f"{begin}lora_b"] @ values[f"{begin}lora_a"])
                n_experts += parameter.dim() == 3
    assert n_experts == 3 * sum(base.has_experts(layer) for layer in range(base.n_layers))
    tokens_BT = torch.randint(0, spec.vocab_size, (2, 12))
    torch.testing.assert_close(adapted(tokens_BT), merged(tokens_BT), rtol=1e-12, atol=1e-12)


def test_a_checkpoint_has_adapters_alone_and_is_taken_up_bit_by_bit_on_another_layout(tmp_path: Path):
    spec, before = replace(SPEC, lora=LORA), None
    for step, layout in enumerate((Layout(), Layout(dp_shard=2, zero=3))):
        outcomes = run_ranks(hop, layout.world_size, tmp_path, layout, step, spec)
        assert all(loaded is None or equal(loaded, before) for loaded, _ in outcomes)
        before = outcomes[0][1]
        manifest = read_manifest(CheckpointStore(tmp_path).path_of(step + 1))
        assert manifest.tensors
        assert all(name.endswith(("lora_a", "lora_b")) for name in manifest.tensors)


def run_file(base: Path, out: Path, **changed: object) -> dict[str, object]:
    """A run of one step that adapts the weights in `base`."""
    table = {"out": str(out), "steps": 1, "device": "cpu", "data": {"path": "none"}, "lora": {"rank": 3}}
    table |= {"batch": {"seq_len": 16, "global_batch": 8}, "model": {"from": str(base)}}
    return table | {"init": {"weights": str(base)}} | changed


def adapting(config: RunConfig) -> Trainer:
    """Return the trainer of a run with adapters, with the weights of its base. Every rank calls this."""
    model, record = build_model(config, torch.device("cpu"), compiled=False), base_record(config)
    assert record is not None
    fill_base(model, record)
    return build_trainer(config, model, torch.device("cpu"), compiled=False, base=record)


def save_adapted(base: Path, folder: Path, tp: int = 2, **changed: object) -> Logical:
    """To be run on every rank: save a run's first checkpoint, and return the values of all its parameters."""
    config = parse(run_file(base, folder, layout={"tp": tp}, **changed))
    trainer = adapting(config)
    model = trainer.model
    save(
        CheckpointStore(folder / CHECKPOINTS), trainer, TrainingProgress(1, 8, config.seed), DATA, resolved_toml(config)
    )
    return {name: whole(parameter) for name, parameter in model.named_parameters.items()}


def adapted(folder: Path) -> tuple[Path, Path, Logical]:
    """A base, a checkpoint of a run that adapts it, and the values of the parameters."""
    base = saved(folder / "base", FAMILIES["llama"])
    values, _ = run_ranks(save_adapted, 2, base, folder / "run")
    return base, CheckpointStore(folder / "run" / CHECKPOINTS).path_of(1), values


def test_the_weights_of_a_checkpoint_are_its_adapters_and_the_base_that_it_names(tmp_path: Path):
    base, checkpoint, values = adapted(tmp_path)
    weights, whole_base = open_weights(checkpoint), open_weights(base)
    assert weights.shapes.keys() == values.keys()
    assert weights.spec.lora == LoraSpec(rank=3)
    for name, value in values.items():
        box = (0,) * value.dim(), tuple(value.shape)
        assert torch.equal(weights.read(name, *box), value)
        assert name not in whole_base.shapes or torch.equal(whole_base.read(name, *box), value)


def test_a_run_is_a_base_by_the_checkpoint_that_was_read(alone: None, tmp_path: Path):
    files, base, out = saved(tmp_path / "files", FAMILIES["llama"]), tmp_path / "base", tmp_path / "out"
    first, second = (base / CHECKPOINTS / checkpoint_name(step) for step in (1, 2))
    first.parent.mkdir(parents=True)
    import_weights(files, first)
    model = {"from": str(files)}
    save_adapted(base, out, tp=1, model=model)
    (file,) = files.glob("*.safetensors")
    save_file({name: tensor + 1 for name, tensor in load_file(file).items()}, file)
    import_weights(files, second)
    assert str(open_weights(base).path) == str(second)
    checkpoint = CheckpointStore(out / CHECKPOINTS).path_of(1)
    weights = open_weights(checkpoint)
    assert isinstance(weights, AdaptedWeights)
    assert weights.base.path == first
    resumed = base_record(parse(run_file(base, out, checkpoint={"resume": "auto"}, model=model)))
    assert resumed == weights.manifest.base
    other = base_record(parse(run_file(base, tmp_path / "new", model=model)))
    assert other is not None
    assert other.path == str(second)


def test_adapters_are_compared_by_matrices_rank_and_scale(alone: None, tmp_path: Path):
    base, out = saved(tmp_path / "base", FAMILIES["llama"]), tmp_path / "out"
    save_adapted(base, out, tp=1)
    checkpoint = CheckpointStore(out / CHECKPOINTS).path_of(1)
    alike = {"rank": 3, "alpha": 16 / 3**0.5, "rslora": True, "targets": ["ffn", "q", "k", "v", "attention.o"]}
    load(checkpoint, adapting(parse(run_file(base, out, lora=alike))), None)
    start = {"weights": str(checkpoint)}
    assert initial_weights_problems(parse(run_file(base, out, lora=alike, init=start))) == []
    other = {"rank": 4, "alpha": 8.0, "targets": ["attention"]}
    wanted = [
        "its adapters have lora.rank=3, and this run has 4; set lora.rank=3",
        "its adapters have lora.alpha=16.0, and this run has 8.0; set lora.alpha=16.0",
        'its adapters have lora.targets=["attention", "ffn"], and this run has ["attention"]; '
        'set lora.targets=["attention", "ffn"]',
    ]
    config = parse(run_file(base, out, lora=other, init=start))
    assert initial_weights_problems(config) == [f"init.weights='{checkpoint}': {each}" for each in wanted]
    with pytest.raises(CheckpointError) as refused:
        load(checkpoint, adapting(config), None)
    assert refused.value.problems[:3] == [f"{checkpoint}: {each}" for each in wanted]


def test_what_cannot_have_adapters_names_the_way_out(alone: None, tmp_path: Path):
    base, out = saved(tmp_path / "base", FAMILIES["llama"]), tmp_path / "out"
    save_adapted(base, out, tp=1)
    checkpoint = CheckpointStore(out / CHECKPOINTS).path_of(1)
    with pytest.raises(InputError, match=f"adapters have no mean: {checkpoint}; export each with --merge first"):
        merge([base, checkpoint], tmp_path / "merged")
    with pytest.raises(CheckpointError, match="has adapters, which no other format has; export it with --merge first"):
        read_own_state(out)
    write_weights_folder(open_weights(checkpoint), "x", tmp_path / "imported")
    with pytest.raises(CheckpointError, match=r"has adapters, and its manifest\.json names no base"):
        open_weights(tmp_path / "imported")


def test_a_base_that_has_changed_is_refused():
    check_that_another_base_is_refused()


def check_that_another_base_is_refused() -> None:
    with tempfile.TemporaryDirectory() as name:
        base, checkpoint, _ = adapted(Path(name))
        (other,) = base.glob("*.safetensors")
        other.write_bytes(other.read_bytes()[:-4096] + bytes(4096))
        refusal = None
        try:
            open_weights(checkpoint)
        except CheckpointError as error:
            refusal = str(error)
        assert refusal == (
            f"{checkpoint} has adapters for the weights in {base}, and that folder has other weights now; put the "
            f"weights back"
        )


def test_the_networks_of_a_model_of_routed_experts_alone_are_named_experts():
    """Without this sentence 'ffn', a default target, was refused with "did you mean 'ffn'?"."""
    refused = replace(EVEN, moe=EXPERTS, lora=LORA).lora_problems()
    assert refused == [
        "lora.targets has 'ffn', and the feed-forward networks of this model are routed experts, which 'experts' "
        "names; set lora.targets=['attention', 'experts'], or leave 'ffn' out"
    ]


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"lora": {"rank": 3, "targets": ["atention"]}}, "no matrix of this model; did you mean 'attention'?"),
        ({"lora": {"rank": 33}}, "lora.rank=33 is above the smaller side of attention.k.weight, 24 x 32; valid: 1 to"),
        ({"lora": {"rank": 3}, "init": {}}, "init.weights names none; set init.weights, or leave [lora] out"),
        ({"lora": {"alpha": 8.0}}, "lora.alpha=8.0 is not used with lora.rank=0; set lora.rank, or leave it out"),
    ],
)
def test_adapters_that_fit_no_model_are_refused(tmp_path: Path, changed: dict[str, object], said: str):
    base = saved(tmp_path / "base", FAMILIES["llama"])
    with pytest.raises(ConfigError) as refused:
        parse(run_file(base, tmp_path, **changed))
    assert any(said in problem for problem in refused.value.problems), refused.value.problems


def test_a_first_stage_without_adapters_is_refused():
    first_routed = MoESpec(n_experts=4, top_k=2, d_ffn=16, dense_layers=(2, 3))
    spec = replace(EVEN, n_layers=4, moe=first_routed, lora=LoraSpec(rank=3, targets=("ffn",)))
    (problem,) = problems(spec, Layout(pp=2), 16)
    assert "the first pipeline stage has layers 0 to 1, and the first layer with an adapter is 2" in problem
    assert problems(spec, Layout(), 16) == []
