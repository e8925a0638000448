"""Prefill and decode on separate accelerators (disaggregated serving).

Some instances read prompts only, others decode only, and the cache of a prompt crosses from the first to the second.
No user waits for another's prompt between two tokens. Sources: Patel et al., Splitwise (arXiv 2311.18677), Zhong et
al., DistServe (arXiv 2401.09670). Ignored: queueing before prefill, and that the transfer of one layer can overlap with
the prefill of the next.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from shardwright.cost.job import Floats
from shardwright.serving import forms
from shardwright.serving.memory import memory
from shardwright.serving.search import Task
from shardwright.serving.setting import Batch, Degrees, Settings
from shardwright.serving.space import Layout, batches
from shardwright.serving.work import cache_token_bytes, period_s


@dataclass(frozen=True)
class Separate:
    """`readers` instances of `prefill` and `writers` of `decode`, each of the latter with `batch` requests. Seconds are
    means; `transfer_s`: of the cache of a prompt, part of `ttft_s`. `accelerators`: that are used."""

    prefill: Degrees
    readers: int
    decode: Degrees
    writers: int
    batch: int
    ttft_s: float
    tpot_s: float
    transfer_s: float
    tokens_per_s: float
    accelerators: int

    def per_accelerator(self) -> float:
        """Output tokens a second of one accelerator."""
        return self.tokens_per_s / self.accelerators


def separate(task: Task, every: Sequence[Layout]) -> Separate | None:
    """The split of the cluster with the most tokens a second within the limits; None where there is none.

    Each number of accelerators for prefill is tried with the layout that reads the most prompts a second on one of its
    accelerators within the limit of the first token, beside each layout and batch for decoding.
    """
    degrees = list(dict.fromkeys(each.degrees for each in every))
    readers = _readers(task, degrees)
    writers = _writers(task, degrees)
    total = task.serving.cluster.size
    best: Separate | None = None
    for prefill, read_s, way_s in readers:
        ttft = read_s + way_s
        if ttft > task.ttft_s:
            continue
        for decode, batch, tpot in writers:
            if prefill.size + decode.size > total:
                continue
            each_reads, each_writes = 1 / read_s, batch / (task.output_len * tpot)
            found = _split(total, prefill.size, decode.size, each_reads, each_writes)
            rate = min(found[0] * each_reads, found[1] * each_writes) * task.output_len
            if best is None or rate > best.tokens_per_s:
                best = Separate(prefill, found[0], decode, found[1], batch, ttft, tpot, way_s, rate, total)
    return best


def _split(total: int, size_read: int, size_write: int, each_reads: float, each_writes: float) -> tuple[int, int]:
    """Numbers of instances that keep up with one another best."""
    most = (total - size_write) // size_read
    numbers = np.arange(1, most + 1)
    others = (total - numbers * size_read) // size_write
    at = int(np.argmax(np.minimum(numbers * each_reads, others * each_writes)))
    return int(numbers[at]), int(others[at])


def _readers(task: Task, degrees: Sequence[Degrees]) -> list[tuple[Degrees, float, float]]:
    """Layouts that hold weights and a prompt, with the seconds of a prompt and of its transfer."""
    settings = Settings.of(degrees)
    held = memory(task.serving, settings, max(task.engine.max_tokens, task.input_len))
    fits = held.cache / held.token * settings.dp >= task.input_len
    read = np.broadcast_to(forms.prefill_s(task.serving, settings, 1.0, task.input_len), fits.shape)
    way = transfer_s(task, settings)
    return [(degrees[k], float(read[k]), float(way[k])) for k in np.flatnonzero(fits).tolist()]


def transfer_s(task: Task, settings: Settings) -> Floats:
    """Seconds of the cache of a prompt over the network: every rank of an instance sends what it holds."""
    model, across = task.serving.model, task.serving.cluster.across
    layers = np.ceil(model.n_layers / settings.pp)
    held = layers * cache_token_bytes(task.serving, settings.tp) * task.input_len
    return np.asarray(held / across.bytes_per_s + across.latency_s)


def _writers(task: Task, degrees: Sequence[Degrees]) -> list[tuple[Degrees, int, float]]:
    """Layouts and batches that keep the limit of a further token, with its seconds."""
    settings = Settings.of(degrees)
    held = memory(task.serving, settings, task.engine.max_tokens)
    most = np.floor(held.cache / (held.token * (task.length + 16)) * settings.dp)
    pairs = [
        (at, batch)
        for at, each in enumerate(degrees)
        for batch in batches(min(int(most[at]), task.engine.max_batch * each.dp))
    ]
    if not pairs:
        return []
    at = np.array([pair[0] for pair in pairs])
    requests = np.array([pair[1] for pair in pairs], dtype=np.float64)
    drafted = task.speculation.drafted
    batch = Batch(
        requests=requests, context=forms.middle(task.input_len, task.output_len), drafted=drafted,
        logits=requests * (1 + drafted),
    )  # fmt: skip
    each = period_s(task.serving, Settings.of([degrees[k] for k in at]), batch)
    tpot = each * (1 + drafted * task.speculation.draft_cost) / task.speculation.accepted
    return [(degrees[at[k]], int(requests[k]), float(tpot[k])) for k in range(len(pairs)) if tpot[k] <= task.tpot_s]
