"""Waiting for samples that `data prepare --publish` has not published yet; all ranks continue, or stop, together."""

import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist

from shardwright.data.batches import Batches
from shardwright.training.preparing import prepare_failure
from shardwright.training.sources import RunSamples

POLL_S = 0.5
"""Pause between two looks at the manifests."""


class PublishedSamples:
    """The samples that every rank of a run can read. Without sources that grow, all of them."""

    def __init__(
        self,
        samples: RunSamples,
        should_stop: Callable[[], bool],
        say: Callable[[str], None],
        each_look: Callable[[], None] = lambda: None,
    ) -> None:
        """`should_stop`: whether a signal asked this rank to stop. `say`: prints a remark. `each_look`: called after
        the manifests were read."""
        self.samples, self._should_stop, self._say, self._each_look = samples, should_stop, say, each_look
        self.shortage: str | None = None
        """Why the run ends before its last step, if it waited in vain."""
        self.way_out = "continue `data prepare`"
        """The remedy for the shortage."""
        self._agreed = [0] * len(samples.order.orders)
        """The samples of each source that every rank can read."""

    def wait(self, batches: Batches, beat: Callable[[], None]) -> bool:
        """Return whether every rank can read the next batch. Wait for it up to `data.wait_s` after the last shard, and
        until a signal asks any rank to stop. Every rank calls this before each batch. `beat` is called in each pause.
        """
        data, order = self.samples.config.data, self.samples.order
        if data.order == "all":
            return True
        needed, ahead = batches.end_of(1), batches.end_of(1 + data.prefetch)
        since_s, waits = time.monotonic(), False
        while not order.is_within(ahead, self._agreed):
            for source_order in order.orders:
                source_order.grow()
            self._each_look()
            late = time.monotonic() - since_s >= data.wait_s
            failure = self._deleted(needed) or prepare_failure(Path(self.samples.config.out))
            ends = [-int(self._should_stop()), -int(failure is not None), int(late)]
            numbers = torch.tensor([*(source_order.published for source_order in order.orders), *ends])
            dist.all_reduce(numbers, dist.ReduceOp.MIN)
            *agreed, stops, failed, late = numbers.tolist()
            if agreed != self._agreed:
                self._agreed, since_s = agreed, time.monotonic()
            elif (failed or late) and not order.is_within(needed, self._agreed):
                reason = failure or ("a prepare failed" if failed else f"data.wait_s={data.wait_s:g} s have passed")
                self.shortage = f"{self._missing(needed)}; {reason}"
                return False
            if order.is_within(needed, self._agreed):
                return True
            if stops:
                return False
            if not waits:
                self._say(f"waiting: {self._missing(needed)}")
                waits = True
            beat()
            time.sleep(POLL_S)
        return True

    def _deleted(self, needed: int) -> str | None:
        """Return why a further epoch cannot be read, or None."""
        folders = self.samples.sources.folders
        pairs = zip(folders, self.samples.order.orders, self.samples.order.taken(needed), strict=True)
        if ended := [folder for folder, order, n in pairs if order.ended and n > order.published]:
            self.way_out = f"delete {ended[0]} and raise data.keep_gib, so that it is prepared again"
            return f"its shards were trained on once and the first are deleted (data.keep_gib): {ended[0]}"
        return None

    def _missing(self, needed: int) -> str:
        taken = self.samples.order.taken(needed)
        return "; ".join(
            f"the next step takes sample {n:,} of {name}, and `data prepare` has published {published:,}"
            for name, n, published in zip(self.samples.sources.folders, taken, self._agreed, strict=True)
            if n > published
        )
