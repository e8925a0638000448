"""Proves that a plan counts the FLOPs and the held bytes of gradients that travel as products as they are in a real
step; their messages are in test_traffic.py."""

from dataclasses import replace
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch.utils.flop_counter import FlopCounterMode

from shardwright.cost import memory
from shardwright.cost.job import Candidates
from shardwright.cost.rank_parameters import rank_parameters
from shardwright.cost.step import estimate
from shardwright.layout.layout import Layout
from shardwright.parallel.norm import local_part
from shardwright.parallel.powersgd import PowerSGD
from shardwright.system.errors import LayoutError
from tests.cost.jobs import job
from tests.cost.test_traffic import MODELS
from tests.distributed import run_ranks
from tests.training.worlds import RATE, build, local_batch

RANK_4 = Layout(dp_replicate=2, compress_gradients="powersgd-4")
SPEC = replace(MODELS["experts"], n_layers=2)


def in_a_step(layout: Layout) -> tuple[int, int]:
    """FLOPs of the products of this rank, and bytes that it holds for the next step."""
    trainer, counted = build(layout, torch.float32, SPEC), []
    plain = PowerSGD.sum

    def sum_counted(products: PowerSGD) -> None:
        with FlopCounterMode(display=False) as counter:
            plain(products)
        counted.append(counter.get_total_flops())

    with patch.object(PowerSGD, "sum", sum_counted):
        trainer.step(local_batch(0, layout.data_rank(dist.get_rank()), layout.data_ranks, accumulation=2), 0, RATE)
    kept = trainer.model.compression_state.values()
    return sum(counted), sum(local_part(each).nbytes for each in kept)


def test_the_flops_and_the_held_bytes_of_products_are_those_of_a_real_step():
    the_job = job(SPEC, on="h100:2/2", seq_len=16, global_batch=8, precision="fp32")
    whole, products = (
        Candidates.from_layout(replace(RANK_4, compress_gradients=how), 1)
        for how in ("none", RANK_4.compress_gradients)
    )
    held = rank_parameters(the_job, products, 0)
    flops = 8 * 4 * held.compressed[0] + 8 * 4 * 4 * held.left_rows[0]
    n_bytes = [memory.estimate_memory(the_job, each).kinds["gradients"].item() for each in (products, whole)]
    assert held.compressed[0] > 0.5 * held.dense[0]
    assert set(run_ranks(in_a_step, 2, RANK_4)) == {(flops, n_bytes[0] - n_bytes[1])}


def test_a_slow_network_is_what_products_are_for():
    """Over 25 Gb/s links an 8B model's gradients are 32 GB a rank, and its factors 40 MB."""
    layout = Layout(dp_replicate=16)
    for on, faster in (("h100:16/1@25", True), ("h100:16/16", False)):
        times = [
            estimate(job(on=on, precision="fp32", seq_len=512, global_batch=16), each).parts_s["data parallel"]
            for each in (replace(layout, compress_gradients="powersgd-4"), layout)
        ]
        assert (times[0] < times[1]) is faster, (on, times)


def test_products_in_16_bits_are_refused_with_the_way_out():
    with pytest.raises(LayoutError, match="and here the precision is bf16; price it with --precision fp32"):
        estimate(job(on="h100:2/2"), RANK_4)
