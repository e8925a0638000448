"""Proves that a checkpoint holds exactly what was trained, that any layout can take it up, that damage is seen.

Each test is a world of 1, 2 or 4 gloo ranks with a tiny model; what a rank meets, an error too, comes back from it.
"""

import os
import stat
from contextlib import ExitStack
from copy import copy
from dataclasses import MISSING, fields, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from shardwright.layout.layout import Layout
from shardwright.model.linear_sizes import LinearAttentionSpec
from shardwright.model.lora_sizes import LoraSpec
from shardwright.model.mup import MupSpec
from shardwright.model.sections import LatentAttentionSpec, MoESpec, RopeScaling
from shardwright.model.spec import ModelSpec
from shardwright.system.errors import CheckpointError
from shardwright.training.checkpoint import saver, state
from shardwright.training.checkpoint.manifest import TrainingProgress
from shardwright.training.checkpoint.saver import save
from shardwright.training.checkpoint.state import load
from shardwright.training.checkpoint.store import CheckpointStore
from shardwright.training.optimizer import build_optimizer
from tests.distributed import run_ranks
from tests.marks import prove, rest_prove
from tests.mutation import Mutation, mutated
from tests.training.checkpoints import (
    DATA,
    ONE,
    ZERO_3,
    Logical,
    equal,
    hop,
    load_ranks,
    logical,
    save_ranks,
    take_step,
)
from tests.training.worlds import OPTIMIZER, SEED, SPEC, build, local_batch


def test_what_is_loaded_is_what_was_saved(tmp_path):
    expected, _ = run_ranks(save_ranks, 2, tmp_path, ZERO_3)
    assert len(expected) == 4 * 21, "itself, two moments and a step count for each of 21 parameters"
    for found in run_ranks(load_ranks, 2, tmp_path / "step-00000001", ZERO_3):
        assert equal(found, expected)


LAYOUTS = [
    ONE,
    Layout(dp_shard=2, zero=1),
    Layout(dp_shard=4, zero=3),
    Layout(dp_replicate=2, dp_shard=2, zero=2),
    Layout(dp_replicate=2),
    Layout(dp_shard=2, zero=2),
    Layout(dp_replicate=4),
    Layout(zero=3),
]


# 4 query heads on 2 kv heads, so that 4 ranks of tp hold copies of them, and 31 rows of vocabulary, dealt out unevenly.
GROUPED = replace(SPEC, n_heads=4, n_kv_heads=2, qk_norm=True)
CUT = [
    Layout(tp=2, sequence_parallel=False),
    Layout(dp_shard=2, tp=2, zero=3, sequence_parallel=True),
    ONE,
    Layout(tp=4, sequence_parallel=False),
    Layout(cp=2, cp_method="ring", zero=2),
    Layout(dp_replicate=2, tp=2, sequence_parallel=True),
    Layout(dp_shard=2, tp=4, zero=1, sequence_parallel=False),
    Layout(cp=2, cp_method="ring", tp=2, sequence_parallel=False),
    Layout(dp_shard=4, zero=3),
]

EXPERTS = replace(
    GROUPED, moe=MoESpec(n_experts=4, top_k=2, d_ffn=16, first_dense=1, bias_rate=0.01, aux_loss=0.1, aux_scope="batch")
)
LATENT = LatentAttentionSpec(q_rank=10, kv_rank=12, nope_dim=8, rope_dim=4, v_dim=8)
EXPERTS_AND_LATENT = replace(EXPERTS, n_kv_heads=4, qk_norm=False, latent_attention=LATENT)
DEALT_OUT = [
    Layout(dp_shard=2, zero=2, ep=2),
    ONE,
    Layout(dp_shard=2, tp=2, zero=3, sequence_parallel=True, ep=4),
    Layout(cp=2, cp_method="ring", ep=2),
    Layout(pp=2, dp_shard=2, zero=1, ep=2),
    Layout(tp=2, sequence_parallel=True),
    Layout(dp_replicate=2, dp_shard=2, zero=3, ep=2),
    Layout(dp_shard=2, zero=3),
]


@pytest.mark.parametrize("n_layouts", rest_prove([len(LAYOUTS)]))
def test_any_layout_takes_up_bit_for_bit_what_any_other_has_saved(tmp_path, n_layouts: int):
    expected = None
    for step, layout in enumerate(LAYOUTS[:n_layouts]):
        for loaded, _ in (outcomes := run_ranks(hop, layout.world_size, tmp_path, layout, step)):
            assert expected is None or equal(loaded, expected), layout
        expected = outcomes[0][1]


@prove
def test_tensor_and_context_parallel_layouts_take_up_bit_for_bit_what_any_other_has_saved(tmp_path):
    expected = None
    for step, layout in enumerate(CUT):
        for loaded, saved in (outcomes := run_ranks(hop, layout.world_size, tmp_path, layout, step, GROUPED)):
            assert expected is None or equal(loaded, expected), layout
            assert saved["model/embedding.weight"].shape == (31, 24), (
                "the true size, though 31 rows are on 2 ranks or 4"
            )
        expected = outcomes[0][1]


def test_unequal_shards_of_rows_of_tp_are_taken_up_bit_for_bit(tmp_path):
    odd = replace(GROUPED, vocab_size=61)  # on 2 ranks 31 and 30, and on 3 ranks of each 11, 11, 9 and 10, 10, 10
    expected = None
    for step, layout in enumerate([Layout(dp_shard=3, tp=2, zero=3, sequence_parallel=True), Layout(dp_shard=2), ONE]):
        for loaded, saved in (outcomes := run_ranks(hop, layout.world_size, tmp_path, layout, step, odd)):
            assert expected is None or equal(loaded, expected), layout
            assert saved["model/embedding.weight"].shape == (61, 24)
        expected = outcomes[0][1]


@pytest.mark.parametrize(
    ("spec", "n_layouts"),
    [
        pytest.param(EXPERTS, 2, id="two layouts"),
        pytest.param(EXPERTS, len(DEALT_OUT), id="every layout", marks=prove),
        pytest.param(EXPERTS_AND_LATENT, len(DEALT_OUT), id="latent attention", marks=prove),
    ],
)
def test_experts_dealt_out_in_any_way_are_taken_up_bit_for_bit_with_the_biases_of_routers(
    tmp_path, spec: ModelSpec, n_layouts: int
):
    expected: Logical = {}
    for step, layout in enumerate(DEALT_OUT[:n_layouts]):
        outcomes = run_ranks(hop, layout.world_size, tmp_path, layout, step, spec)
        # A rank of pp has the tensors of its stage.
        assert not step or set().union(*(loaded for loaded, _ in outcomes)) == expected.keys()
        for loaded, _ in outcomes:
            assert not step or equal(loaded, {name: expected[name] for name in loaded}), layout
        before, expected = expected, {name: tensor for _, saved in outcomes for name, tensor in saved.items()}
        router = "model/layers.1.ffn.router"
        assert not step or not torch.equal(expected[f"{router}.bias"], before[f"{router}.bias"]), "each step moves it"
        assert expected[f"{router}.load"].sum().item() == pytest.approx(4), "relative to an even load"
        assert expected["optimizer/exp_avg/layers.1.ffn.experts.up"].shape == (4, 16, 24)


@pytest.mark.parametrize(
    "layout",
    [
        pytest.param(LAYOUTS[2], id="sharded"),
        pytest.param(LAYOUTS[3], id="hybrid", marks=prove),
        pytest.param(LAYOUTS[6], id="replicated", marks=prove),
    ],
)
def test_every_byte_is_written_once_and_by_all_ranks_together(tmp_path, layout):
    expected = run_ranks(save_ranks, 4, tmp_path, layout)[0]
    folder = tmp_path / "step-00000001"
    files = sorted(folder.glob("*.safetensors"))
    assert len(files) == 4
    bodies = [path.stat().st_size - 8 - int.from_bytes(path.read_bytes()[:8], "little") for path in files]
    assert sum(bodies) == sum(tensor.numel() * tensor.element_size() for tensor in expected.values())
    assert min(bodies) > 0


def save_with_umask(folder: Path, umask: int) -> None:
    os.umask(umask)
    save_ranks(folder, Layout(dp_shard=2))


@pytest.mark.parametrize("umask", [0o022, 0o027])
def test_the_files_of_a_checkpoint_have_the_permissions_of_the_umask(tmp_path, umask):
    run_ranks(save_with_umask, 2, tmp_path, umask)
    files = list((tmp_path / "step-00000001").iterdir())
    assert {path.suffix for path in files} == {".safetensors", ".json", ".toml"}
    assert {stat.S_IMODE(path.stat().st_mode) for path in files} == {0o666 & ~umask}


@prove
def test_a_dim_smaller_than_the_number_of_ranks_is_saved_and_loaded(tmp_path):
    # 3 rows over 4 ranks: one rank holds nothing of the embedding and the head.
    spec = replace(SPEC, vocab_size=3, d_model=6, n_heads=1, head_dim=2, d_ffn=3)
    layout = Layout(dp_shard=4, zero=3)
    expected = run_ranks(save_untrained, 4, tmp_path, layout, spec)[0]
    for other in (layout, ONE, ZERO_3):
        for found in run_ranks(
            load_ranks, other.world_size, tmp_path / "step-00000001", other, (), torch.float32, spec
        ):
            assert equal(found, expected)


def save_untrained(folder: Path, layout: Layout, spec: ModelSpec) -> Logical:
    trainer = build(layout, torch.float32, spec)
    save(CheckpointStore(folder), trainer, TrainingProgress(step=1, samples=12, seed=SEED), DATA, "")
    return logical(trainer)


FREE = ("dropout", "init_std", "max_seq_len")
"""Fields of a model that a run may change when it goes on."""
OTHERS = {
    "family": "of an extension",
    "norm": "layernorm",
    "norm_position": "after",
    "activation": "gelu_tanh",
    "positions": "learned",
    "rope_scaling": RopeScaling(kind="linear", factor=2.0),
    "moe": MoESpec(n_experts=4, top_k=2, d_ffn=16),
    "latent_attention": LATENT,
    "linear_attention": LinearAttentionSpec(n_k_heads=1, n_v_heads=1, k_dim=4, v_dim=4, full_interval=0),
    "mup": MupSpec(base_width=16),
    "lora": LoraSpec(rank=2, targets=("attention",)),
    "nope_layers": (0,),
    "global_layers": (0,),
}


def load_with_each_field_changed(folder: Path) -> dict[str, str]:
    """What is said of a checkpoint by a run whose model differs in one field, by the name of the field."""
    trainer, found = build(ONE, torch.float32), {}
    whole = trainer.model.spec
    for each in fields(ModelSpec):
        value = getattr(whole, each.name)
        other = OTHERS[each.name] if each.name in OTHERS else not value if isinstance(value, bool) else value * 2 + 1
        trainer.model.spec = copy(whole)
        object.__setattr__(trainer.model.spec, each.name, other)  # past the rules, which other fields have a part in
        try:
            load(folder / "step-00000001", trainer, DATA)
            found[each.name] = ""
        except CheckpointError as error:
            found[each.name] = str(error)
    return found


def test_a_run_whose_model_differs_in_any_one_field_does_not_go_on(tmp_path: Path):
    run_ranks(save_ranks, 1, tmp_path, ONE)
    (found,) = run_ranks(load_with_each_field_changed, 1, tmp_path)
    assert [name for name, said in found.items() if not said] == [each for each in found if each in FREE]
    assert "lora" in found.pop("lora")
    assert all(f"it is of another model: {name}=" in said for name, said in found.items() if said)


WITH_EXPERTS = replace(SPEC, moe=MoESpec(n_experts=4, top_k=2, d_ffn=16))


def without_defaults(spec: ModelSpec) -> dict[str, Any]:
    """What a version saves that has no field with a default."""
    kept = {f.name: getattr(spec, f.name) for f in fields(spec) if getattr(spec, f.name) != f.default}
    return kept | {"moe": {f.name: getattr(spec.moe, f.name) for f in fields(MoESpec) if f.default is MISSING}}


def load_what_an_earlier_version_saved(folder: Path) -> list[str]:
    """What is said of a checkpoint by a run of the same model and of two others."""
    trainer, said = build(ONE, torch.float32, WITH_EXPERTS), []
    with patch.object(saver, "spec_as_json", without_defaults):
        save(
            CheckpointStore(folder, keep_last=9),
            trainer,
            TrainingProgress(step=1, samples=12, seed=SEED),
            DATA,
            "steps = 1\n",
        )
    for changes in ({}, {"window": 5}, {"moe": replace(WITH_EXPERTS.moe, n_groups=2)}):
        trainer.model.spec = replace(WITH_EXPERTS, **changes)
        try:
            load(folder / "step-00000001", trainer, DATA)
            said.append("")
        except CheckpointError as error:
            said.append(str(error))
    return said


def test_fields_that_an_earlier_version_did_not_save_have_their_defaults(tmp_path: Path):
    ((same, window, groups),) = run_ranks(load_what_an_earlier_version_saved, 1, tmp_path)
    assert same == ""
    assert "it is of another model: window=0, and this run has 5" in window
    assert "it is of another model: moe=" in groups


@pytest.mark.parametrize("field", ["rope_theta", "norm_eps"])
def test_a_field_that_is_not_compared_is_seen(tmp_path: Path, field: str):
    mutation = Mutation(
        "shardwright.training.checkpoint.state:_differences",
        "('dropout', 'init_std', 'max_seq_len', 'lora')",
        f"('dropout', 'init_std', 'max_seq_len', 'lora', {field!r})",
    )
    run_ranks(save_ranks, 1, tmp_path, ONE)
    (found,) = run_ranks(load_with_a_bug, 1, tmp_path, mutation)
    assert not found[field]
    assert sum(not said for said in found.values()) == len(FREE) + 1


def load_with_a_bug(folder: Path, mutation: Mutation) -> dict[str, str]:
    with mutated(mutation):
        return load_with_each_field_changed(folder)


def test_a_checkpoint_of_another_model_seed_or_data_is_refused_and_says_why(saved):
    def complaint(**named) -> str:
        order = {"dtype": torch.float32, "spec": SPEC, "seed": SEED, "data": DATA} | named
        errors = run_ranks(load_ranks, 2, saved, ZERO_3, (), *order.values())
        assert str(errors[0]) == str(errors[1])
        assert type(errors[0]) is CheckpointError, "it is whole, so an earlier one would be no better"
        return str(errors[0])

    assert "it is of another model: d_ffn=40, and this run has 48" in complaint(spec=replace(SPEC, d_ffn=48))
    assert "n_layers=2, and this run has 3" in complaint(spec=replace(SPEC, n_layers=3))
    assert f"seed={SEED} and this run has seed=6, so samples would repeat; set seed={SEED}" in complaint(seed=6)
    exchanged = DATA["mixture"] | {"sources": [{"name": "tale", "fingerprint": "0" * 64}]}
    other = complaint(data=DATA | {"mixture": exchanged})
    assert "source 1 was 'book' with tokens of fingerprint ffffffffffff..., and 'tale' (000000000000...)" in other
    assert "of seq_len=10, and this run cuts them with seq_len=20" in complaint(data=DATA | {"seq_len": 20})
    assert "sequences='documents'" in complaint(data=DATA | {"sequences": "documents"})
    dtype = complaint(dtype=torch.float64)
    assert "model/embedding.weight is float32 [31, 24], and this run has float64 [31, 24]" in dtype
    assert "61 more tensors differ" in dtype
    assert "is not a checkpoint: there is no such folder" in str(run_ranks(load_ranks, 1, saved / "no", ONE)[0])


CAST_IN_LOADING = Mutation(
    "shardwright.training.checkpoint.state:_differences", "(saved.shape, saved.dtype)", "(saved.shape, dtype)"
)


@prove
def test_bug_23_a_dtype_that_is_cast_in_loading_would_be_seen(saved):
    # The check mutated away, float32 goes into float64 in silence; so it is the check that refuses.
    for found in run_ranks(load_ranks, 2, saved, ZERO_3, (CAST_IN_LOADING,), torch.float64):
        assert isinstance(found, dict)
        assert {tensor.dtype for name, tensor in found.items() if "/step/" not in name} == {torch.float64}
    assert all(
        isinstance(error, CheckpointError) for error in run_ranks(load_ranks, 2, saved, ZERO_3, (), torch.float64)
    )


def resumed_step(path: Path | None, decay: float, rate: float, mutations: tuple[Mutation, ...] = ()) -> Logical:
    """The state after a step at `decay` and `rate`, from a checkpoint or, if None, from the same state by training."""
    with ExitStack() as stack:
        stack.enter_context(mutated(*mutations))
        trainer = build(ZERO_3, torch.float32)
        if path is None:
            take_step(trainer, ZERO_3, 0)
            for group in trainer.optimizer.param_groups:
                group["weight_decay"] = decay if group["weight_decay"] else 0.0
        else:
            optimizer = build_optimizer(
                trainer.model.named_parameters, trainer.model.spec, OPTIMIZER.model_copy(update={"weight_decay": decay})
            )
            trainer.optimizer = optimizer
            state.load(path, trainer, DATA)
        batch = local_batch(1, ZERO_3.data_rank(dist.get_rank()), 2, 1)
        trainer.forward_backward(batch, 1)
        trainer.update(rate)
        return logical(trainer)


STALE = {
    "weight decay of the checkpoint": Mutation(
        "shardwright.training.checkpoint.state:load",
        "return manifest",
        "trainer.optimizer.param_groups[0]['weight_decay'] = 0.1\nreturn manifest",
    ),
    "rate of the step before": Mutation(
        "shardwright.training.step:Trainer.update",
        "set_learning_rate(self.optimizer, rate)\nself.optimizer.step()",
        "self.optimizer.step()\nset_learning_rate(self.optimizer, rate)",
    ),
}


def test_the_first_step_after_a_resume_has_the_weight_decay_and_the_rate_of_the_run_file(saved):
    expected = run_ranks(resumed_step, 2, None, 0.7, 3e-3)[0]
    assert equal(run_ranks(resumed_step, 2, saved, 0.7, 3e-3)[0], expected)
    # It is a difference that shows.
    assert not equal(run_ranks(resumed_step, 2, saved, 0.1, 3e-3)[0], expected)


@prove
@pytest.mark.parametrize("bug", STALE)
def test_bug_24_a_parameter_group_that_is_stale_after_a_resume_is_seen(saved, bug):
    expected = run_ranks(resumed_step, 2, None, 0.7, 3e-3)[0]
    assert not equal(run_ranks(resumed_step, 2, saved, 0.7, 3e-3, (STALE[bug],))[0], expected)
