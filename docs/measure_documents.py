"""CPU-seconds of attention within documents, for docs/packed-documents.md.

python -m docs.measure_documents DATA

DATA: a folder written by `shardwright data prepare`. Attention alone, forward and backward, fp32, 4 query and 1 kv
heads of 64: on one process over a sequence, and within documents of equal lengths; and over a ring of cp with the
documents of DATA, zig-zag in the sequence and dealt. Medians of three.
"""

import statistics
import sys
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from shardwright.data.samples import PackedSamples
from shardwright.data.shards import open_split
from shardwright.model.attention import attend
from shardwright.model.documents import Documents
from shardwright.parallel.context import ContextAttention
from shardwright.split.documents import Lengths
from shardwright.verification.ranks import run_ranks

HEADS, KV_HEADS, WIDTH = 4, 1, 64
SEQ_LEN, RING, SEQUENCES, TIMES = 8192, 2, 4, 3


def cpu_s(attention: Callable[..., Tensor], tokens: int, lengths: Lengths | None) -> float:
    """CPU-seconds of forward and backward, the median."""
    documents = None if lengths is None else Documents((lengths,))
    shapes = [(1, tokens, heads, WIDTH) for heads in (HEADS, KV_HEADS, KV_HEADS)]
    found = []
    for _ in range(TIMES + 1):
        q, k, v = (torch.randn(shape, requires_grad=True) for shape in shapes)
        began = time.thread_time()
        o = attention(q, k, v, documents)
        middle = time.thread_time() - began
        began = time.process_time()  # the backward pass has a thread of its own
        o.sum().backward()
        found.append(middle + time.process_time() - began)
    return statistics.median(found[1:])


def on_rank(sequences: list[Lengths]) -> list[float]:
    """CPU-seconds of this rank for all sequences: zig-zag in the sequence, and dealt."""
    torch.set_num_threads(1)
    ways = [ContextAttention("zigzag", dist.group.WORLD, None, deals) for deals in (False, True)]
    return [sum(cpu_s(way, SEQ_LEN // RING, each) for each in sequences) for way in ways]


def main(folder: str) -> None:
    """Print the two tables."""
    torch.set_num_threads(1)
    whole = cpu_s(attend, SEQ_LEN, None)
    print(f"one process, {SEQ_LEN} tokens: documents of | scores | CPU-seconds, over those of the sequence")
    for length in (8192, 2048, 512, 128, 32):
        within = cpu_s(attend, SEQ_LEN, (length,) * (SEQ_LEN // length))
        print(f"{length} | {(length + 1) / (SEQ_LEN + 1):.1%} | {within / whole:.3f}")
    samples = PackedSamples(open_split(folder, "train"), SEQ_LEN)
    sequences = [tuple(samples.documents(i * len(samples) // SEQUENCES)) for i in range(SEQUENCES)]
    ranks = run_ranks(on_rank, RING, sequences)
    print(f"cp {RING}, {SEQUENCES} sequences: CPU-seconds of the rank with the most, over the mean; of all ranks")
    for name, found in zip(("zig-zag", "dealt"), zip(*ranks, strict=True), strict=True):
        print(f"{name} | {max(found) / statistics.mean(found):.2f} | {sum(found) / sum(rank[0] for rank in ranks):.2f}")


if __name__ == "__main__":
    from docs import measure_documents  # not __main__, which the ranks cannot import

    measure_documents.main(*sys.argv[1:])
