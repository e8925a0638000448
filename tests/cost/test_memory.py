"""Proves the memory of a rank: textbook numbers, what more sharing may and may not do, and measured peaks.

P is the number of parameters, N the ranks that share their state.
"""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwright.cost import memory
from shardwright.cost.gradients import embedding_gradient
from shardwright.cost.hardware import cluster
from shardwright.cost.job import Candidates
from shardwright.cost.memory import KINDS, MOMENTS
from shardwright.cost.reserved import reserved_bytes
from shardwright.cost.stack import FSDP, MEGATRON_CORE, SHARDWRIGHT, STACKS, Stack
from shardwright.layout.layout import Layout
from shardwright.model.modules import rows
from shardwright.model.presets import resolve
from shardwright.schedule.registry import find, names
from tests.cost.layouts import job, one

STATES = ("weights", "master", "gradients", "optimizer")
# The peak is in the loss, before gradients of a step exist.
COPIES_LOGITS = replace(SHARDWRIGHT, logit_kept_bytes=4, logit_peak_bytes=12, logits_together=0)
# Of the ZeRO paper: gradients in 16 bits, and shards of working weights beside those of the master weights.
ZERO = replace(
    COPIES_LOGITS,
    gradient_bytes=2,
    keeps_gradients=True,
    reduced_bytes=0,
    weight_gradient_bytes=0,
    gathers_master=False,
)


def states(candidates: Candidates, stack: Stack = ZERO, model: str = "llama-3.1-8b", precision: str = "bf16") -> float:
    """Bytes of weights, gradients and optimizer, those on their way aside."""
    found = memory.estimate_memory(job(model, stack, precision=precision), candidates)
    assert MOMENTS[found.moment[0, 0]] == "loss", "no gradients on their way"
    return sum(float(found.kinds[kind].sum()) for kind in STATES)


def test_seven_billion_parameters_take_112_gb():
    assert 7e9 * states(one(8)) / resolve("llama-3.1-8b").n_parameters == 112e9
    assert 7e9 * states(one(8), precision="fp32") / resolve("llama-3.1-8b").n_parameters == pytest.approx(98e9)


def test_llama_3_8b_takes_128_gb_before_activations():
    assert states(one(8)) == pytest.approx(128e9, rel=0.005)


@pytest.mark.parametrize("n", [2, 8, 64])
def test_each_stage_of_zero_shares_out_what_its_paper_says(n: int):
    p = resolve("llama-3.1-8b").n_parameters
    zero = [states(one(1, dp_shard=n if at else 1, dp_replicate=1 if at else n, zero=at)) for at in range(4)]
    assert zero == pytest.approx([16 * p, 4 * p + 12 * p / n, 2 * p + 14 * p / n, 16 * p / n])


def test_in_fp32_shards_stand_beside_the_weights_that_zero_1_and_2_gather_from_them():
    p = resolve("llama-3.1-8b").n_parameters
    for zero, n_bytes in ((0, 0), (1, 4 * p / 8), (2, 4 * p / 8), (3, 0)):
        layout = {"dp_shard": 8} if zero else {"dp_replicate": 8}
        of = job(seq_len=8192, precision="fp32")
        kinds = memory.estimate_memory(of, one(1, "selective", zero=zero, **layout)).kinds
        assert kinds["weights"][0, 0] == pytest.approx(4 * p / (8 if zero == 3 else 1))
        assert kinds["master"][0, 0] == pytest.approx(n_bytes)
    assert memory.estimate_memory(of, one(8, zero=1)).kinds["master"][0, 0] == 0  # a single rank gathers nothing


def test_ranks_of_cp_share_states_and_replicas_do_not():
    p = resolve("llama-3.1-8b").n_parameters
    assert states(one(2, dp_replicate=4, dp_shard=2, cp=4, zero=3)) == pytest.approx(16 * p / 8)


def test_the_distributed_optimizer_of_megatron_takes_6_bytes_and_12_shared_ones():
    held = memory.estimate_memory(job(stack=MEGATRON_CORE, global_batch=64), one(8, dp_shard=8, zero=1))
    ends = 2 * 128256 * 4096
    p = resolve("llama-3.1-8b").n_parameters - ends + 2 * 4096 * -(-128256 // 128) * 128
    assert sum(held.kinds[kind].sum() for kind in STATES) == pytest.approx(6 * p + 12 * p / 8)


def gradients(global_batch: int, precision: str = "bf16", **layout: Any) -> float:
    of = job(stack=COPIES_LOGITS, global_batch=global_batch, precision=precision)
    return float(memory.estimate_memory(of, one(1, "selective", **layout)).kinds["gradients"].max())


def test_fsdp_reduces_the_gradients_of_embedding_and_untied_head_as_one_group():
    """With ZeRO 2 both 16-bit gradients exist next to one buffer in fp32, after all layers."""
    of, candidates = job(), one(8, dp_shard=8, zero=2)
    step = memory.StepMemory(of, candidates)
    n_bytes = embedding_gradient(of, candidates, step.stages, step.params, np.array([8]))
    assert n_bytes == pytest.approx((2 + 4) * 2 * 128256 * 4096, rel=1e-4)


def test_gradients_exist_from_the_first_backward_pass_of_a_step_on():
    """The peak is in the loss, before which a step of one micro-batch has computed none."""
    p = resolve("llama-3.1-8b").n_parameters
    for zero, n_bytes in ((1, 4 * p), (2, p / 2), (3, p / 2)):
        assert gradients(8, dp_shard=8, zero=zero) == 0
        assert gradients(16, dp_shard=8, zero=zero) == pytest.approx(n_bytes)
    # In fp32 without ZeRO they are views of buckets that are all-reduced, and are zeroed instead of freed.
    assert gradients(8, "fp32", dp_replicate=8) == 4 * p


def test_a_pipeline_of_as_many_microbatches_as_ranks_has_the_gradients_of_one_stage_after_another():
    """With four virtual stages of eight layers a rank has those of two layers at a time; those of the stages that are
    through are sharded over 2 ranks. With more micro-batches all four accumulate."""
    layout = {"pp": 4, "dp_shard": 2, "zero": 1, "pp_schedule": "interleaved-1f1b", "virtual_stages": 4}
    few, many = gradients(8, **layout), gradients(64, **layout)
    a_layer = 4 * (resolve("llama-3.1-8b").n_parameters - 2 * 4096 * 128256 - 4096) / 32
    assert many > 8 * a_layer > 4 * a_layer > few


def test_zero_3_holds_no_gathered_block_while_the_loss_runs():
    found = memory.estimate_memory(job(stack=COPIES_LOGITS, seq_len=8192), one(1, "selective", dp_shard=8, zero=3))
    assert MOMENTS[found.moment[0, 0]] == "loss"
    assert found.kinds["gathered"][0, 0] == 2 * (2 * 4096 * 128256 + 4096)


def test_experts_are_shared_out_over_the_ranks_that_hold_the_same():
    spec = resolve("mixtral-8x7b")
    experts = sum(row.numel for row in rows(spec).values() if row.kind == "expert")
    found = states(one(4, dp_shard=16, zero=1, ep=8), model="mixtral-8x7b")
    dense = spec.n_parameters - experts
    assert found == pytest.approx(dense * (4 + 12 / 16) + experts / 8 * (4 + 12 / 2))


def test_kinds_add_up_and_the_fullest_rank_is_the_peak():
    found = memory.estimate_memory(job(), one(1, pp=4, dp_shard=2, zero=1, pp_schedule="zb-v"))
    assert set(found.kinds) == set(KINDS)
    assert all((values >= 0).all() for values in found.kinds.values())
    assert found.peak_bytes[0] == found.rank_bytes[0].max() == sum(found.kinds.values()).max()
    assert found.reserved_bytes[0] > found.peak_bytes[0]


def test_a_pipeline_that_gathers_once_a_step_holds_a_whole_stage():
    step, microbatch = (
        memory.estimate_memory(job(), one(1, pp=4, dp_shard=2, zero=3, zero_pp_gather=when))
        for when in ("step", "microbatch")
    )
    p = resolve("llama-3.1-8b").n_parameters
    assert step.kinds["gathered"].sum() == pytest.approx(2 * p)
    assert (step.rank_bytes > microbatch.rank_bytes).all()
    assert (step.kinds["master"] == microbatch.kinds["master"]).all()


def test_fsdp_in_a_pipeline_holds_a_whole_stage_since_backward_passes_free_no_layers():
    """`torch.distributed.pipelining` sets `set_reshard_after_backward(False)`."""

    def ranks(**stack: bool) -> dict[str, memory.Floats]:
        of = job(stack=replace(FSDP, **stack))
        return {
            when: memory.estimate_memory(of, one(1, pp=4, dp_shard=2, zero=3, zero_pp_gather=when)).rank_bytes
            for when in ("step", "microbatch")
        }

    pipelining, own = ranks(), ranks(reduces_after_pipelines=False)
    assert (pipelining["step"] == pipelining["microbatch"]).all()
    assert (pipelining["step"] == own["step"]).all()
    assert (own["step"] > own["microbatch"]).all()


def test_the_fullest_moment_is_the_loss_of_the_last_stage_where_logits_are_large():
    found = memory.estimate_memory(job(seq_len=8192), one(1, "full", pp=2))
    assert [MOMENTS[at] for at in found.moment[0]] == ["backward", "loss"]
    assert found.kinds["logits"][0, 0] == 0
    # With them the gradients of the head's input and matrix, once the copies of a part of the logits are gone.
    assert found.kinds["logits"][0, 1] == 2 * 8192 * 128256 + 2 * 4096 * 8192 + 2 * 4096 * 128256


def test_the_optimizers_step_is_the_fullest_where_activations_are_few():
    found = memory.estimate_memory(job("debug", replace(FSDP, step_bytes=100), seq_len=1), one())
    assert MOMENTS[found.moment[0, 0]] == "optimizer"
    assert found.kinds["activations"][0, 0] == found.kinds["gathered"][0, 0] == 0
    assert found.kinds["working"][0, 0] == 100 * resolve("debug").n_parameters


def taken(
    stack: str, model: str, micro_batch: int, recompute: str, **layout: int | bool | str
) -> memory.MemoryEstimate:
    return memory.estimate_memory(job(model, STACKS[stack]), one(micro_batch, recompute, **layout))


def peak(**layout: Any) -> float:
    return float(taken(**layout).peak_bytes[0])


LAYOUTS = st.fixed_dictionaries(
    {
        "stack": st.sampled_from(sorted(STACKS)),
        "model": st.sampled_from(["llama-3.1-8b", "gpt-22b", "mixtral-8x7b"]),
        "micro_batch": st.sampled_from([1, 2]),
        "recompute": st.sampled_from(["none", "selective", "full"]),
        "tp": st.sampled_from([1, 2, 4]),
        "pp": st.sampled_from([1, 4]),
        "cp": st.sampled_from([1, 2]),
    }
)
FEW = settings(max_examples=60, deadline=None)


@FEW
@given(LAYOUTS, st.sampled_from([2, 4]))
def test_memory_never_rises_with_the_stage_of_zero(layout: dict[str, Any], n: int):
    one, two, three = (
        taken(**layout, sequence_parallel=True, zero=zero, dp_shard=n, **_each_microbatch(layout, zero))
        for zero in (1, 2, 3)
    )
    none = peak(**layout, sequence_parallel=True, dp_replicate=n)
    assert none >= one.peak_bytes[0] >= two.peak_bytes[0]
    # On few ranks, a stage of few layers may gather at once more than ZeRO-3 has sharded of its weights.
    more = three.kinds["weights"] + three.kinds["gathered"] - two.kinds["weights"]
    assert three.peak_bytes[0] <= two.peak_bytes[0] + max(0.0, float(more.max()))


def _each_microbatch(layout: dict[str, int | str], zero: int) -> dict[str, str]:
    """Gathering once a step holds more than ZeRO-2 by design, to save messages."""
    return {"zero_pp_gather": "microbatch"} if zero == 3 and layout["pp"] != 1 else {}


@FEW
@given(LAYOUTS)
def test_memory_falls_with_every_rank_of_tp_that_shares_tokens_too(layout: dict[str, int | str]):
    found = [peak(**{**layout, "tp": tp}, sequence_parallel=True) for tp in (1, 2, 4, 8)]  # type: ignore[arg-type]
    assert found[0] > found[1] > found[2] > found[3]


@FEW
@given(LAYOUTS)
def test_memory_never_rises_as_more_is_computed_again(layout: dict[str, int | str]):
    found = [peak(**{**layout, "recompute": again}) for again in ("none", "selective", "full")]  # type: ignore[arg-type]
    assert found[0] >= found[1] >= found[2]


@FEW
@given(LAYOUTS)
def test_a_larger_microbatch_never_takes_less(layout: dict[str, int | str]):
    # As much where the optimizer's step is what takes most.
    assert peak(**layout) <= peak(**{**layout, "micro_batch": 4})  # type: ignore[arg-type]


@pytest.mark.parametrize("schedule", [name for name in names() if not find(name).searched])
def test_the_curve_of_a_step_rises_to_the_peak_and_no_further(schedule: str):
    candidates = one(1, pp=4, pp_schedule=schedule, virtual_stages=2 if schedule == "interleaved-1f1b" else 1)
    of = job(global_batch=48)
    peaks = memory.estimate_memory(of, candidates).rank_bytes[0]
    for rank in range(4):
        curve = memory.curve(of, candidates, rank)
        assert curve.labels[-1] == "optimizer"
        assert curve.total_bytes.shape == (len(curve.labels),)
        assert curve.total_bytes.max() == pytest.approx(peaks[rank], rel=1e-12)
        assert curve.kinds["activations"][-1] == 0


@pytest.mark.parametrize("stack", [SHARDWRIGHT, FSDP])
def test_many_layouts_at_once_cost_what_each_costs_alone(stack: Stack):
    layouts = [
        {"tp": 2, "dp_shard": 4, "zero": 1},
        {"tp": 1, "dp_shard": 8, "zero": 3},
        {"tp": 4, "cp": 2, "dp_shard": 1, "zero": 2},
    ]
    alone = [one(1 + at % 2, pp=2, sequence_parallel=True, **each) for at, each in enumerate(layouts)]  # type: ignore[arg-type]
    fields = ("dp_replicate", "dp_shard", "cp", "tp", "ep", "zero", "sequence_parallel", "micro_batch", "recompute")
    together = replace(alone[0], **{name: np.concatenate([getattr(each, name) for each in alone]) for name in fields})
    the_job = job(stack=stack)
    found = memory.estimate_memory(the_job, together)
    assert reserved_bytes(the_job, together) == pytest.approx(found.reserved_bytes, rel=1e-12)
    for at, each in enumerate(alone):
        assert found.rank_bytes[at].tolist() == memory.estimate_memory(the_job, each).rank_bytes[0].tolist()


@pytest.mark.parametrize(("on", "mib"), [("h100:8", 32), ("b200:8", 32), ("a100:8", 4), ("rtx4090:8", 4)])
def test_transformer_engine_has_a_workspace_for_its_matmuls_and_four_for_those_of_experts(on: str, mib: int):
    """Of 32 MiB from compute capability 9.0 on, else of 4."""
    for model, count in (("llama-3.1-8b", 1), ("mixtral-8x7b", 5)):
        the_job = replace(job(model, MEGATRON_CORE), cluster=cluster(on))
        found = memory.estimate_memory(the_job, one()).kinds["workspace"]
        assert found.tolist() == [[(76 + count * mib) * 2**20]]
        assert memory.estimate_memory(replace(the_job, stack=FSDP), one()).kinds["workspace"].tolist() == [[64 * 2**20]]


def test_an_input_in_a_buffer_for_messages_counts_once():
    """Of 2 stages with 8 micro-batches, of which the last stage has one in flight: 8 gradients for the first, 8 inputs
    for the last, whose layers keep one less. Other stacks have a buffer in each direction."""
    the_job, of = job(stack=FSDP, global_batch=32), one(micro_batch=4, pp=2)
    ahead = memory.estimate_memory(the_job, of)
    without = memory.estimate_memory(replace(the_job, stack=replace(FSDP, receives_ahead=False)), of)
    message = 4 * 4096 * 4096 * 2
    assert (ahead.kinds["buffers"] / message).tolist() == [[8, 8]]
    assert (without.kinds["buffers"] / message).tolist() == [[2, 2]]
    assert ((ahead.kinds["activations"] - without.kinds["activations"]) / message).tolist() == [[0, -1]]


def test_layers_that_do_not_recompute_keep_everything_and_the_first_of_each_stage_less():
    def activations_of(**recompute: object) -> np.ndarray:
        layout = Layout(tp=8, pp=4, zero=0, dp_replicate=2, **recompute)  # type: ignore[arg-type]
        return memory.estimate_memory(
            job("llama-3.1-70b", STACKS["shardwright"]), Candidates.from_layout(layout, 1)
        ).kinds["activations"][0]

    every, none = activations_of(recompute="selective"), activations_of()
    some = activations_of(recompute="selective", recompute_layers=5)
    # 80 layers in four stages, of 20 but for the ends: a quarter of a stage recomputes.
    assert np.all((every < some) & (some < none))
    assert ((none - some) / (none - every))[1] == pytest.approx(5 / 20)
    assert activations_of(recompute="selective", recompute_layers=80) == pytest.approx(every)


def test_a_chunked_loss_has_the_logits_of_a_chunk_and_keeps_gradients_instead():
    """Llama-3 8B, one sequence of 4096 tokens over tp 8, bf16: the formulas of docs/chunked-loss.md by hand."""

    def logits_of(**chosen: object) -> float:
        candidates = Candidates.from_layout(Layout(tp=8, **chosen), 1)  # type: ignore[arg-type]
        return float(memory.estimate_memory(job("llama-3.1-8b"), candidates).kinds["logits"][0, 0])

    tokens, rows, width = job("llama-3.1-8b").seq_len, 128256 / 8, 4096
    kept = tokens / 8 * width * 2 + rows * width * 4
    chunk = 1024 * rows * 2 + 1024 * rows * 4 + 2 * tokens * width * 2
    product = (1024 + width) * rows * 2 + 2 * tokens * width * 2
    assert logits_of(loss_chunk_tokens=1024) == pytest.approx(kept + max(chunk, product))
    in_loss = tokens * rows * 4  # fewer than the loss takes at a time, and more than the gradients of the head
    assert logits_of() == pytest.approx(tokens * rows * 2 + in_loss)
