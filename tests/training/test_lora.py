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
from torch.nn import functional

from shardwright.config import parse
from shardwright.conversion.own import read_own_state
from shardwright.layout.layout import Layout
from shardwright.model.dropout import Draw, InputMask
from shardwright.model.init import initialise
from shardwright.model.lora_sizes import LoraSpec
from shardwright.model.matmul import Linear, linear
from shardwright.model.random import keep_mask, matrix_key, matrix_keys, sample_keys
from shardwright.model.sections import MoESpec
from shardwright.model.transformer import Transformer, layer_site_keys
from shardwright.runs.folder import CHECKPOINTS, checkpoint_name
from shardwright.split.rules import problems
from shardwright.system.errors import CheckpointError, ConfigError, InputError
from shardwright.training.base_weights import base_record
from shardwright.training.checkpoint.manifest import read_manifest
from shardwright.training.checkpoint.state import load
from shardwright.training.checkpoint.store import CheckpointStore
from shardwright.training.importing import import_weights, write_weights_folder
from shardwright.training.initial_weights import initial_weights_problems
from shardwright.training.merging import merge
from shardwright.training.weights import AdaptedWeights, open_weights
from shardwright.verification import Verifier
from shardwright.verification.case import ADAPTER_STD
from tests.distributed import run_ranks
from tests.hugging_face.models import FAMILIES, saved
from tests.marks import prove, rest_prove
from tests.training.adapted_models import (
    DORA,
    DROPPED,
    LATENT_HEADS,
    LAYOUTS,
    LORA,
    MODELS,
    OF_EXPERTS,
    adapting,
    case_of,
    error_before_adams_steps,
    run_file,
    save_adapted,
)
from tests.training.bugs.bug import EXPERTS
from tests.training.checkpoints import Logical, equal, hop
from tests.training.test_switches import (
    DENSE,
    STARCODER,
)
from tests.training.worlds import CASE, EVEN, SPEC

QUICK = ("sp", "zero 3", "pp")


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


@pytest.mark.parametrize(
    "name", rest_prove(MODELS, "no adapter in the last stage", "of experts, tp, ep, selective", "DoRA, biases, tp")
)
def test_adapters_of_every_kind_of_model_train_as_in_one_process(verifier: Verifier, name: str):
    changes, layout, lora = MODELS[name]
    case = replace(case_of(layout, replace(EVEN, **changes), lora), steps=2)
    assert not case.spec.problems()
    assert not case.spec.lora_problems()
    report = verifier.parity(case, layout)
    assert report.equal, report.differing or report.worst
    assert error_before_adams_steps(report) < 1e-12


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


@pytest.mark.parametrize("changes", [STARCODER, LATENT_HEADS], ids=["biases", "latent attention"])
def test_dora_computes_as_dense_weights_whose_norms_are_constants(changes: dict[str, Any]):
    check_that_dora_computes_as_dense_weights(changes)


def check_that_dora_computes_as_dense_weights(changes: dict[str, Any]) -> None:
    base = replace(EVEN, **changes)
    model, dense = Transformer(replace(base, lora=DORA)).double(), Transformer(base).double()
    initialise(model, model.spec, 0, b_std=ADAPTER_STD)
    assert all(value.std() > 0 for name, value in model.named_parameters() if name.endswith("bias"))
    weights = {name: value for name, value in model.named_parameters() if "lora_" not in name}
    adapters = {name: value for name, value in model.named_parameters() if "lora_" in name}
    magnitudes = [name for name in adapters if name.endswith("lora_magnitude")]
    assert len(magnitudes) == len(adapters) / 3
    for name in magnitudes:
        begin = name.removesuffix("lora_magnitude")
        norms_F = weights[f"{begin}weight"].detach().norm(dim=1)
        row = weights[f"{begin}weight"] + DORA.scale * adapters[f"{begin}lora_b"] @ adapters[f"{begin}lora_a"]
        weights[f"{begin}weight"] = row * ((norms_F + adapters[name]) / row.detach().norm(dim=1)).unsqueeze(1)
    tokens_BT, targets_BT = torch.randint(0, base.vocab_size, (2, 2, 12))
    both = []
    for logits_BTV in (model(tokens_BT), torch.func.functional_call(dense, weights, (tokens_BT,))):
        loss = functional.cross_entropy(logits_BTV.flatten(0, 1), targets_BT.flatten())
        both.append((logits_BTV, *torch.autograd.grad(loss, list(adapters.values()))))
    for ours, expected in zip(*both, strict=True):
        torch.testing.assert_close(ours, expected, rtol=1e-10, atol=1e-12)


@prove
@pytest.mark.parametrize("lora", [DROPPED, DORA], ids=["dropout", "DoRA"])
def test_compiled_blocks_with_adapters_have_no_graph_break_and_compute_as_uncompiled_ones(lora: LoraSpec):
    torch._dynamo.reset()
    spec = replace(EVEN, lora=lora)
    plain, compiled = Transformer(spec).double(), Transformer(spec).double()
    for model in (plain, compiled):
        initialise(model, spec, 0, b_std=ADAPTER_STD)
    for block in compiled.layers.values():
        block.compile(fullgraph=True)  # an error at a graph break
    tokens_BT, losses = torch.randint(0, spec.vocab_size, (2, 16)), []
    for step in range(2):  # the masks of the first step are no constants of the graph
        keys_B, gradients = sample_keys(0, step, torch.arange(2)), []
        for model in (plain, compiled):
            loss = model(tokens_BT, None, keys_B).square().mean()
            gradients.append(torch.autograd.grad(loss, [p for p in model.parameters() if p.requires_grad]))
            losses.append(loss.detach())
        torch.testing.assert_close(*gradients, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(losses[1::2], losses[::2], rtol=1e-12, atol=0.0)
    assert (losses[0] != losses[2]) == bool(lora.dropout)
    torch._dynamo.reset()


def test_each_adapter_drops_elements_of_its_own_input_in_training_alone():
    check_that_adapters_drop_their_inputs()


def test_a_matmul_of_a_dropped_input_has_its_gradients():
    check_gradients_of_a_dropped_input()


def check_gradients_of_a_dropped_input() -> None:
    mask = InputMask(Draw(torch.tensor([5, 6]), torch.arange(3)), 0.5, 6)
    x_BTD, weight_rD = (torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in ((2, 3, 10), (4, 10)))
    assert torch.autograd.gradcheck(
        lambda x, weight: linear(x, weight, recipe=mask), (x_BTD, weight_rD), raise_exception=False
    )


def check_that_adapters_drop_their_inputs() -> None:
    spec = replace(EVEN, lora=replace(LORA, dropout=0.5))
    model = Transformer(spec).double()
    initialise(model, spec, 0, b_std=ADAPTER_STD)
    seen: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
    for name, module in model.named_modules():
        if isinstance(module, Linear) and module.dropout is not None:
            module.register_forward_hook(lambda _, x, y, name=name: seen.__setitem__(name, (x[0], y)))
    tokens_BT, keys_B = torch.randint(0, spec.vocab_size, (2, 64)), torch.tensor([5, 6])
    model(tokens_BT, torch.arange(64), keys_B)
    kept = {}
    for name, (x_BTD, y_BTF) in seen.items():
        module = model.get_submodule(name)
        assert isinstance(module, Linear)
        of_layer = layer_site_keys(keys_B, int(name.split(".")[1]))
        assert of_layer is not None
        mask = keep_mask(
            matrix_keys(of_layer[0], matrix_key(name.split(".", 2)[2])), torch.arange(64), x_BTD.shape[-1], 0.5
        )
        low = (x_BTD * mask * 2) @ module.lora_a.T @ module.lora_b.T * 2.0
        torch.testing.assert_close(y_BTF, x_BTD @ module.weight.T + low, rtol=1e-12, atol=1e-12)
        kept[name] = mask[..., :24]
        assert abs(mask.double().mean() - 0.5) < 0.05
    assert len(kept) == 7 * spec.n_layers
    first, *others = kept.values()
    assert not any(torch.equal(first, other) for other in others)
    plain = Transformer(replace(spec, lora=LORA)).double()
    plain.load_state_dict(model.state_dict())
    assert torch.equal(model.eval()(tokens_BT, torch.arange(64), keys_B), plain(tokens_BT, torch.arange(64)))


def test_a_checkpoint_has_adapters_alone_and_is_taken_up_bit_by_bit_on_another_layout(tmp_path: Path):
    spec, before = replace(SPEC, lora=DORA), None
    for step, layout in enumerate((Layout(), Layout(dp_shard=2, zero=3))):
        outcomes = run_ranks(hop, layout.world_size, tmp_path, layout, step, spec)
        assert all(loaded is None or equal(loaded, before) for loaded, _ in outcomes)
        before = outcomes[0][1]
        manifest = read_manifest(CheckpointStore(tmp_path).path_of(step + 1))
        assert manifest.tensors
        assert all(name.endswith(("lora_a", "lora_b", "lora_magnitude")) for name in manifest.tensors)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_new_run_with_dora_has_the_bits_of_its_base(dtype: torch.dtype):
    base = replace(EVEN, bias=True)
    adapted, plain = Transformer(replace(base, lora=DORA)), Transformer(base)
    for model in (adapted, plain):
        initialise(model, model.spec, 0)
    tokens_BT = torch.randint(0, base.vocab_size, (2, 12))
    assert torch.equal(adapted.to(dtype)(tokens_BT), plain.to(dtype)(tokens_BT))


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
    other = {"rank": 4, "alpha": 8.0, "targets": ["attention"], "dora": True}
    wanted = [
        "its adapters have lora.rank=3, and this run has 4; set lora.rank=3",
        "its adapters have lora.alpha=16.0, and this run has 8.0; set lora.alpha=16.0",
        "its adapters have lora.dora=false, and this run has true; set lora.dora=false",
        'its adapters have lora.targets=["attention", "ffn"], and this run has ["attention"]; '
        'set lora.targets=["attention", "ffn"]',
    ]
    config = parse(run_file(base, out, lora=other, init=start))
    assert initial_weights_problems(config) == [f"init.weights='{checkpoint}': {each}" for each in wanted]
    with pytest.raises(CheckpointError) as refused:
        load(checkpoint, adapting(config), None)
    assert refused.value.problems[:4] == [f"{checkpoint}: {each}" for each in wanted]


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
        ({"lora": {"rank": 3, "dropout": 1.0}}, "lora.dropout=1.0: input should be less than 1"),
        ({"lora": {"alpha": 8.0}}, "lora.alpha=8.0 is not used with lora.rank=0; set lora.rank, or leave it out"),
    ],
)
def test_adapters_that_fit_no_model_are_refused(tmp_path: Path, changed: dict[str, object], said: str):
    base = saved(tmp_path / "base", FAMILIES["llama"])
    with pytest.raises(ConfigError) as refused:
        parse(run_file(base, tmp_path, **changed))
    assert any(said in problem for problem in refused.value.problems), refused.value.problems


def test_dropout_of_adapters_of_experts_is_refused_as_peft_refuses_it():
    refused = replace(EVEN, moe=EXPERTS, lora=replace(OF_EXPERTS, dropout=0.1)).lora_problems()
    assert refused == [
        "lora.dropout=0.1 with an adapter of ffn.experts.gate: peft has no dropout of adapters of experts; set "
        "lora.dropout=0, or leave experts out of lora.targets"
    ]


def test_dora_of_experts_and_dora_with_dropout_are_refused():
    assert replace(EVEN, moe=EXPERTS, lora=replace(OF_EXPERTS, dora=True)).lora_problems() == [
        "lora.dora=true with an adapter of ffn.experts.gate: peft has no DoRA of experts; set lora.dora=false, or "
        "leave experts out of lora.targets"
    ]
    assert replace(EVEN, lora=replace(DORA, dropout=0.1)).lora_problems() == [
        "lora.dora=true with lora.dropout=0.1: DoRA scales the output of the base too, which reads the whole input; "
        "set lora.dropout=0, or lora.dora=false"
    ]


def test_a_first_stage_without_adapters_is_refused():
    first_routed = MoESpec(n_experts=4, top_k=2, d_ffn=16, dense_layers=(2, 3))
    spec = replace(EVEN, n_layers=4, moe=first_routed, lora=LoraSpec(rank=3, targets=("ffn",)))
    (problem,) = problems(spec, Layout(pp=2), 16)
    assert "the first pipeline stage has layers 0 to 1, and the first layer with an adapter is 2" in problem
    assert problems(spec, Layout(), 16) == []
