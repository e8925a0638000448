"""Seconds of messages over tp, cp and data ranks, and of what overlaps with them, by hand: Llama 8B, 4096 tokens, on
links of 100 GB/s without a rise with size, 1 us a message."""

from dataclasses import replace

import numpy as np
import pytest

from shardwright.cost.blocks import blocks
from shardwright.cost.calibration import CALIBRATED
from shardwright.cost.data_parallel import OverlappedPasses, data_parallel
from shardwright.cost.hardware import Cluster
from shardwright.cost.job import FULL, Job
from shardwright.cost.layer import head, layer
from shardwright.cost.messages import _reached
from shardwright.cost.passes import Passes, reached_bytes_per_s
from shardwright.cost.rank_parameters import rank_parameters
from shardwright.cost.stack import STACKS, Stack
from shardwright.model.presets import PRESETS
from shardwright.split.documents import plan
from tests.cost.jobs import candidates, job
from tests.cost.test_collectives import plain

GB_PER_S = 100e9
LATENCY_S = 1e-6
WHOLE = 4096 * 4096 * 2
"""Bytes of a layer's input, and of its result."""
ONE_S = WHOLE / 2 / GB_PER_S + LATENCY_S
"""An all-gather or reduce-scatter of it over two ranks."""
PARAMETERS, GROUPS = 8_030_261_248, 33
"""Of the model; its 32 blocks, and what is outside of them."""


def on_plain_links(stack: Stack | None = None, inside: float = GB_PER_S, interference: float = 0.2) -> Job:
    stack = stack or STACKS["shardwright"]
    stack = replace(stack, speed=replace(stack.speed, interference=interference))
    where: Cluster = plain(8, 8, inside=inside, latency_s=LATENCY_S)
    return replace(job(stack=stack), cluster=where)


def layer_passes(the_job: Job, **layout: int | bool | str) -> Passes:
    (block,) = blocks(the_job.model)
    return layer(the_job, candidates(**layout), block)


def over_tp(passes: Passes) -> tuple[float, float]:
    forward, backward = (float(part["tensor parallel"][0]) for part in (passes.forward, passes.backward_input))
    return forward, backward


def test_a_layer_gathers_and_scatters_twice_forward_and_three_times_each_way_backward():
    """Two regions: of each the gather of the result's gradient is exposed, the gather of the input beside the input
    gradients and the scatter of its gradient beside the weight gradients slow these by a fifth of their own time."""
    forward, backward = over_tp(layer_passes(on_plain_links(), tp=2))
    assert forward == pytest.approx(4 * ONE_S)
    assert backward == pytest.approx(2 * ONE_S + 0.2 * 2 * ONE_S + 0.2 * 2 * ONE_S)


BY_MATRIX = replace(STACKS["fsdp"], tp_by_matrix=True, shares_logits=False)
"""Eager PyTorch with a plan of tensor parallelism for each matrix."""


def sent(passes: Passes) -> dict[str, int]:
    """The calls of each kind of collective of one layer and micro-batch."""
    found = dict.fromkeys(("all_gather", "reduce_scatter", "all_reduce"), 0)
    for message in passes.messages:
        found[message.collective.__name__] += int(np.max(message.calls))
    return found


def test_matrices_with_plans_of_their_own_send_the_messages_of_a_published_profile():
    """KempnerForge's profile of 13B on tp 4, eager, with full recomputation, has 6,420 reduce-scatters of 800 layers
    and 20 heads, and 9,679 all-gathers: 8 and 12 of a layer (benchmarks/profiling/13b_24gpu_profiling.md). A compiled
    graph gathers a tensor once for all matrices that read it. Without token shards only sums are sent."""
    on_shards = {"tp": 4, "sequence_parallel": True, "recompute": FULL}
    assert sent(layer_passes(job(stack=BY_MATRIX), **on_shards)) == {
        "all_gather": 12, "reduce_scatter": 8, "all_reduce": 0
    }  # fmt: skip
    compiled = replace(STACKS["fsdp-compiled"], tp_by_matrix=True)
    assert sent(layer_passes(job(stack=compiled), **on_shards)) == {
        "all_gather": 6, "reduce_scatter": 8, "all_reduce": 0
    }  # fmt: skip
    whole = on_shards | {"sequence_parallel": False}
    assert sent(layer_passes(job(stack=BY_MATRIX), **whole)) == {"all_gather": 0, "reduce_scatter": 0, "all_reduce": 8}
    assert sent(layer_passes(job(stack=STACKS["fsdp"]), **whole)) == {
        "all_gather": 0,
        "reduce_scatter": 0,
        "all_reduce": 5,
    }


def test_a_head_with_a_plan_of_its_own_is_whole_without_token_shards():
    split, whole = (head(job(stack=BY_MATRIX), candidates(tp=4, sequence_parallel=each)) for each in (True, False))
    assert float(whole.forward["matmuls"][0]) == pytest.approx(4 * float(split.forward["matmuls"][0]), rel=0.02)
    assert sent(whole) == dict.fromkeys(sent(whole), 0)
    assert sent(split) == {"all_gather": 2, "reduce_scatter": 1, "all_reduce": 0}


def test_collectives_on_token_shards_copy_the_tensor_where_tokens_are_not_the_first_dim():
    """Two gathers and two scatters forward, each with a copy; in pieces only the gradients of inputs are copied."""
    stack = STACKS["fsdp-compiled"]
    uncopied, in_pieces = (
        replace(stack, speed=replace(stack.speed, **given)) for given in ({"copies_tokens": False}, {"hides_tp": True})
    )
    the_job = on_plain_links(stack)
    once = 2 * WHOLE / float(reached_bytes_per_s(the_job))
    copied, plain = (np.array(over_tp(layer_passes(on_plain_links(each), tp=2))) for each in (stack, uncopied))
    assert copied[0] - plain[0] == pytest.approx(4 * once)
    assert over_tp(layer_passes(the_job, tp=2, sequence_parallel=False)) == over_tp(
        layer_passes(on_plain_links(uncopied), tp=2, sequence_parallel=False)
    )
    fused = replace(in_pieces, speed=replace(in_pieces.speed, copies_tokens=False))
    backward = [over_tp(layer_passes(on_plain_links(each), tp=2))[1] for each in (in_pieces, fused)]
    # The sums of gradients are neither cut into pieces nor next to the weight gradients: 0.8 of them is added, too.
    assert backward[0] - backward[1] == pytest.approx(2 * once + 0.8 * 2 * ONE_S)


def test_a_split_backward_pass_has_no_weight_gradients_beside_its_messages():
    forward, backward = over_tp(layer_passes(on_plain_links(), tp=2, pp=2, pp_schedule="zb-h1"))
    assert forward == pytest.approx(4 * ONE_S)
    assert backward == pytest.approx(2 * ONE_S + 0.2 * 2 * ONE_S + 2 * ONE_S)


def test_in_pieces_all_but_the_first_piece_of_a_message_overlaps():
    core = on_plain_links(STACKS["megatron-core"])
    forward, backward = over_tp(layer_passes(core, tp=2))
    # The exposed first piece, a half on two ranks, slows nothing down.
    assert forward == pytest.approx(4 * ONE_S / 2 + 0.2 * 4 * ONE_S / 2)
    assert backward == pytest.approx(2 * ONE_S / 2 + 0.2 * (4 * ONE_S - 2 * ONE_S / 2) + 0.2 * 2 * ONE_S)


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
def test_a_matmul_hides_no_more_than_its_own_time(schedule: str):
    """On links a hundred times slower messages take longer than the matmuls beside them: of those in F, and in I those
    of gradients of results, of inputs again, and where there is no W in the pass of gradients of inputs."""
    core = on_plain_links(STACKS["megatron-core"], inside=GB_PER_S / 100)
    passes = layer_passes(core, tp=2, pp=2, pp_schedule=schedule)
    matmuls = {name: float(part["matmuls"][0]) for name, part in passes.parts.items()}
    slow_s = 100 * (ONE_S - LATENCY_S) + LATENCY_S
    beside = {"I": 6 * slow_s} if schedule == "zb-h1" else {"I": 4 * slow_s, "W": 2 * slow_s}
    forward, backward = over_tp(passes)
    assert forward == pytest.approx(4 * slow_s - 0.8 * matmuls["F"])
    assert backward == pytest.approx(sum(sent - 0.8 * matmuls[name] for name, sent in beside.items()))


def test_without_token_shards_the_loss_sums_three_numbers_a_token_in_two_messages():
    passes = head(on_plain_links(), candidates(tp=2, sequence_parallel=False))
    # A ring of two ranks sends a buffer once, in two messages.
    assert over_tp(passes)[0] == pytest.approx((4 + 8) * 4096 / GB_PER_S + 2 * 2 * LATENCY_S)


def test_the_head_gathers_its_input_once_more_with_token_shards():
    forward, backward = over_tp(head(on_plain_links(), candidates(tp=2)))
    sums = (4 + 8) * 4096 / GB_PER_S + 2 * 2 * LATENCY_S
    assert forward == pytest.approx(ONE_S + sums)
    assert backward == pytest.approx(0.2 * ONE_S + 0.2 * ONE_S)


def over_cp(passes: Passes) -> tuple[float, float]:
    forward, backward = (float(part["context parallel"][0]) for part in (passes.forward, passes.backward_input))
    return forward, backward


def test_zigzag_sends_keys_and_values_once_forward_and_their_gradients_in_fp32_once_more():
    """Two ranks of 2048 tokens with 8 heads of keys and values of 128, over links so slow that attention to what is
    there does not hide them; each hop then merges 10 bytes an element of the output, of 0.9 x 2039 GB/s."""
    passes = layer_passes(on_plain_links(inside=GB_PER_S / 1000), cp=2)
    attention = [float(part["attention"][0]) for part in (passes.forward, passes.backward_input)]
    hop_s = 1000 * 2048 * 8 * 2 * 128 * 2 / GB_PER_S + LATENCY_S
    merging_s = 10 * 2048 * 4096 / (0.9 * 2039e9 * CALIBRATED.memory_share)
    forward, backward = over_cp(passes)
    assert forward == pytest.approx(hop_s - attention[0] / 2 + merging_s)
    assert backward == pytest.approx(hop_s - attention[1] / 2 + 2 * hop_s - LATENCY_S + merging_s)


def test_gathered_keys_and_values_are_gathered_again_and_their_gradients_exchanged():
    sent_s = 2 * 2048 * 8 * 2 * 128 * 2 / 2 / GB_PER_S + LATENCY_S
    forward, backward = over_cp(layer_passes(on_plain_links(), cp=2, cp_method="allgather"))
    assert forward == pytest.approx(sent_s)
    assert backward == pytest.approx(2 * sent_s)


def test_ulysses_sends_each_rank_a_head_of_keys_and_values_in_two_messages_each_way():
    """Four ranks of 1024 tokens and one head of keys and values: three quarters of 32 query heads, and of four times
    that head, then of 32 heads of results, in three messages each."""
    one_head = replace(PRESETS["llama-3.1-8b"], n_kv_heads=1)
    the_job = replace(on_plain_links(), model=one_head)
    sent = 0.75 * 1024 * 128 * 2 * ((32 + 4 * 2) + 32)
    forward, backward = over_cp(layer_passes(the_job, cp=4, cp_method="ulysses"))
    assert forward == pytest.approx(sent / GB_PER_S + 2 * 3 * LATENCY_S)
    assert backward == pytest.approx(forward)


def uncopied(stack: Stack) -> Stack:
    return replace(stack, speed=replace(stack.speed, copies_parameters=False))


def exposed(
    passes: tuple[list[float], list[float]], slack: list[float], the_job: Job | None = None, **layout: int
) -> float:
    """Seconds of data-parallel messages of one micro-batch a step, by default without copies from and to them."""
    of, the_job = candidates(**layout), the_job or on_plain_links(uncopied(STACKS["shardwright"]))
    one = np.ones((1, 1))
    beside = OverlappedPasses(*(np.array([each]) for each in (*passes, slack)), one, one, 1)
    return float(data_parallel(the_job, of, rank_parameters(the_job, of), np.array([1]), beside)[0])


@pytest.mark.parametrize(("zero", "gathers"), [(1, 1), (2, 1), (3, 2)])
def test_fsdp2_copies_each_gathered_parameter_and_casts_each_gradient_into_its_message(zero: int, gathers: int):
    """A gather is read and written in 2 bytes, a gradient is read in 2 and written in 4; zero 3 gathers layers twice,
    but embedding and head once."""
    stack = STACKS["shardwright"]
    copied, plain = (
        exposed(([0.0], [0.0]), [0.0], on_plain_links(one), dp_shard=8, zero=zero) for one in (stack, uncopied(stack))
    )
    ends = 2 * 128256 * 4096
    gathered = gathers * PARAMETERS - (gathers - 1) * ends
    rate = float(reached_bytes_per_s(on_plain_links(stack)))
    assert copied - plain == pytest.approx((4 * gathered + 6 * PARAMETERS) / rate, rel=1e-3)
    assert exposed(([0.0], [0.0]), [0.0], on_plain_links(stack), zero=zero) == 0


def test_zero_1_sends_one_message_a_block_each_way():
    """Gradients in 4 bytes to the shards, weights in 2 back, of which 7 of 8 parts are sent in 7 messages."""
    found = exposed(([0.0], [0.0]), [0.0], dp_shard=8, zero=1)
    assert found == pytest.approx((4 + 2) * PARAMETERS * 7 / 8 / GB_PER_S + 2 * GROUPS * 7 * LATENCY_S)


def test_nanotron_copies_each_rank_s_part_of_each_tensor_alone():
    """Of Llama 8B on one rank of pp: 32 layers of q k v, o, gate up, down and two norms, and what is outside of them,
    as one. Ranks that replicate have no parts."""
    nanotron = on_plain_links(STACKS["nanotron"])
    at_once = on_plain_links(replace(STACKS["nanotron"], speed=replace(STACKS["nanotron"].speed, part_s=0.0)))
    for layout, parts in (({"dp_shard": 8, "zero": 1}, (32 * 6 + 1) * 8), ({"dp_replicate": 8}, 0)):
        alone, together = (exposed(([0.0], [0.0]), [0.0], each, **layout) for each in (nanotron, at_once))
        assert alone - together == pytest.approx(parts * 10e-6)


def test_zero_3_gathers_blocks_twice_and_what_is_outside_of_them_once():
    found = exposed(([0.0], [0.0]), [0.0], dp_shard=8, zero=3)
    outside = 2 * 128256 * 4096 + 4096
    n_bytes = 4 * PARAMETERS + 2 * PARAMETERS + 2 * (PARAMETERS - outside)
    assert found == pytest.approx(n_bytes * 7 / 8 / GB_PER_S + (2 * GROUPS + GROUPS - 1) * 7 * LATENCY_S)


def test_what_is_longer_than_a_pass_takes_the_slack_of_its_rank_first():
    """An all-reduce of A seconds beside the backward pass of each of two ranks, of 16 layers each. Where a pass is
    shorter its rest is exposed, less the rank's slack; the part of one layer and the slowdown of the pass are not."""
    sent = exposed(([0.0, 0.0], [0.0, 0.0]), [0.0, 0.0], pp=2, dp_replicate=4)
    passes = ([0.0, 0.0], [sent / 2, sent / 4])
    for slack, expected in (
        ([0.0, 0.0], 1 - 1 / 4 + 0.2 / 4),
        ([0.0, sent], 1 - 1 / 2 + 0.2 / 2),
        ([sent, 0.3 * sent], 1 - 1 / 4 + 0.2 / 4 - 0.3),
        ([sent, sent], 1 / 16 + 0.2 / 2),
    ):
        assert exposed(passes, slack, pp=2, dp_replicate=4) == pytest.approx(expected * sent)


def test_a_stack_that_overlaps_nothing_has_its_messages_after_the_pipeline():
    megatron = on_plain_links(STACKS["megatron"])
    alone = exposed(([0.0, 0.0], [0.0, 0.0]), [0.0, 0.0], megatron, pp=2, dp_replicate=4)
    assert exposed(([9.0, 9.0], [9.0, 9.0]), [9.0, 9.0], megatron, pp=2, dp_replicate=4) == alone > 0


@pytest.mark.parametrize("method", ["ring", "zigzag", "allgather"])
@pytest.mark.parametrize(
    ("window", "chunked"),
    [
        *((tokens, False) for tokens in (2, 5, 9, 200)),
        *((tokens, True) for tokens in (5, 20, 30, 40, 64, 96, 100, 120, 160)),
    ],
)
def test_a_rank_receives_the_keys_of_a_window_that_the_plan_of_a_ring_sends(method: str, window: int, chunked: bool):
    """Chunks of 20 tokens or, zig-zag, 10. The rank with the most keys has those before every chunk of its own."""
    ranks, length = 8, 160
    received = max(
        sum(plan(((length,),), method, ranks, rank, False, window, chunked).receives) for rank in range(ranks)
    )
    priced = candidates(cp=ranks, cp_method=method)
    share = float(_reached(replace(job(), seq_len=length), priced, window, chunked=chunked)[0])
    assert share * (length - length // ranks) == pytest.approx(received)
