"""How simple a layout is, and which is shown as the simplest."""

import numpy as np

from shardwright.planner.choice import PricedLayout, read
from shardwright.planner.pool import LayoutPool
from shardwright.planner.simplicity import NEAR, complexity, plainest, settings, simplest, simplest_near
from tests.cost.jobs import job

PIPED = "pp=2,pp_schedule=interleaved-1f1b,virtual_stages=4,dp_shard=4,zero=1,recompute=selective"
PLAIN = "dp_shard=8,zero=2,recompute=selective"
SLOW = "dp_shard=8,zero=1,recompute=full"


def simplest_of(*texts: str, on: str = "h100:8") -> str:
    """The simplest of layouts, the first of which is the fastest."""
    the_job = job(on=on, global_batch=128)
    every = [PricedLayout.from_choice(the_job, read(text)) for text in texts]
    steps = np.array([each.step_s for each in every])
    pool = LayoutPool(the_job, [each.choice.candidates for each in every], steps, np.zeros(len(every)))
    result = simplest([every[0], *simplest_near(every[0], pool)])
    return next(text for text in texts if read(text) == result.choice)


def in_nodes_of_8(*texts: str) -> list[int]:
    return [int(complexity(read(text).candidates, 8)[0]) for text in texts]


def test_fewer_axes_are_simpler_and_then_a_plain_schedule():
    assert in_nodes_of_8("dp_shard=8", PLAIN, "pp=2,dp_shard=4", PIPED, "pp=2,cp=2") == [0, 0, 2, 3, 4]


def test_tp_over_nodes_is_less_simple_than_tp_within_a_node():
    assert in_nodes_of_8("tp=8", "tp=8,pp=2", "tp=16", "tp=6", "tp=8,pp=2,cp=2", "tp=16,pp=2") == [2, 4, 4, 4, 6, 6]
    over, inside = "tp=16,pp=2", "tp=8,pp=4"
    assert simplest_of(over, inside, on="h100:32") == inside


def test_every_key_that_is_switched_on_is_a_setting_but_degrees_stages_and_batches():
    """Replicas are one where each of them is sharded, and virtual stages are part of the schedule."""
    for text, count in (
        ("dp_shard=8,zero=1,micro_batch=2", 0),
        ("dp_replicate=8,zero=0", 0),
        ("tp=2,cp=2,dp_shard=2,zero=3", 0),
        ("dp_replicate=2,dp_shard=4,zero=3", 1),
        ("cp=2,cp_method=ulysses,dp_shard=4", 1),
        (PLAIN, 1),
        (f"{PLAIN},recompute_layers=3,loss_chunk_tokens=4096", 3),
        (PIPED, 2),
        ("dp_replicate=2,dp_shard=4,zero=3,zero_secondary_ranks=2", 2),
        ("pp=2,dp_shard=4,zero=3,zero_pp_gather=microbatch", 1),
    ):
        assert settings(read(text)) == count, text


def test_the_simplest_layout_near_the_fastest_is_shown_though_it_does_not_tie():
    assert simplest_of(PIPED, SLOW) == SLOW
    assert simplest_of(PIPED, SLOW, PLAIN) == PLAIN, "of equally simple ones the fastest"
    far = "dp_shard=8,zero=3,recompute=full,offload_activations=cpu,offload_parameters=cpu,offload_optimizer=cpu"
    the_job = job(on="h100:8", global_batch=128)
    assert (
        PricedLayout.from_choice(the_job, read(far)).step_s
        > NEAR * PricedLayout.from_choice(the_job, read(PIPED)).step_s
    )
    assert simplest_of(PIPED, far) == PIPED


def test_a_setting_that_saves_less_than_a_hundredth_of_the_step_is_left_out():
    assert plainest([1.0, 1.009, 1.008, 1.011], [2, 1, 1, 0]) == 2
    assert plainest([1.0, 1.0], [1, 0]) == 1
