"""Loss spikes and non-finite numbers, found by all ranks together before any weight changes.

Rule, as in OLMo-core's SkipStepOptimizer: given the losses and gradient norms of the last 128 steps, and at least 64, a
step is a spike if its loss or its norm exceeds mean + spike_sigma x standard deviation of its window. Unlike in
OLMo-core, a non-finite value never enters a window (one NaN would make the standard deviation NaN for 128 steps), and
is a spike from the first step on. Finite values of spikes enter, so a lasting change of level is learned.

All ranks judge the same two numbers, which one all-reduce sums over the world: the ranks' parts of the loss, and their
gradient norms divided by the world size. So they agree to the last bit, and a NaN on one rank is a NaN on all.

With `faults.recheck`, a step with non-finite numbers is run again in place, with the same samples, weights and random
numbers, as in the rerun state machine of Megatron-LM. A different result means a faulty device; the same result means
that the data or the model is the cause. Only this verdict is kept from the first try.

The numbers are read while the device clips gradients. On a GPU, a separate stream copies them, and the host waits for
that copy alone, so the device still has queued work when the host queues the optimizer's.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from statistics import fmean, stdev
from typing import Annotated, Any

import torch
import torch.distributed as dist
from pydantic import ConfigDict, Field, with_config
from torch import Tensor

from shardwright.config.faults import LEAST_WINDOW, SPIKE_WINDOW, FaultsSection
from shardwright.layout.layout import Layout
from shardwright.parallel.model import ParallelModel
from shardwright.parallel.norm import local_part
from shardwright.parallel.objects import gathered
from shardwright.system.processes import ranks_in_words

Count = Annotated[int, Field(ge=0, lt=2**63)]
Finite = Annotated[float, Field(allow_inf_nan=False)]
Window = Annotated[list[Finite], Field(max_length=SPIKE_WINDOW)]


@with_config(ConfigDict(strict=True, extra="forbid"))
@dataclass
class SpikeState:
    """The spike state in a checkpoint: loss and gradient norm of the last steps, `in_a_row` spikes since the last
    step that was taken, and `skipped` steps of the run."""

    losses: Window = field(default_factory=list)
    norms: Window = field(default_factory=list)
    in_a_row: Count = 0
    skipped: Count = 0


@dataclass(frozen=True)
class Spike:
    """A step that was found to be a spike. `why`: the number that broke the rule, with the rule's values. `where`:
    the ranks and the parameter that a non-finite number comes from. `losing`: the ranks whose part of the loss is
    not finite."""

    loss: float
    norm: float
    why: str
    where: str = ""
    losing: tuple[int, ...] = ()

    @property
    def finite(self) -> bool:
        """Return whether loss and norm are finite."""
        return math.isfinite(self.loss) and math.isfinite(self.norm)

    def __str__(self) -> str:
        text = f"{self.why} (loss {self.loss:.6g}, gradient norm {self.norm:.6g})"
        return f"{text}; {self.where}" if self.where else text


@dataclass(frozen=True)
class Recheck:
    """Two tries of one step. `first` has a non-finite number. `second` is None if the step can be taken with the
    second try's `loss` and `norm`. `suspects`: if the tries differ, the ranks that may have the faulty device, if
    known."""

    first: Spike
    second: Spike | None
    loss: float
    norm: float
    suspects: tuple[int, ...] = ()

    @property
    def same(self) -> bool:
        """Return whether both tries have the same non-finite numbers, on the same ranks, from the same parameter on.
        Finite numbers are not compared, because GPU kernels may add in a different order each time."""
        return self.second is not None and _not_finite(self.first) == _not_finite(self.second)

    def __str__(self) -> str:
        if self.same:
            return "run again with the same samples and weights it gave the same: the data or the model, not a device"
        result = self.second or f"loss {self.loss:.6g}, gradient norm {self.norm:.6g}"
        text = f"run again with the same samples and weights it gave another result ({result}): a faulty device"
        if len(self.suspects) == 1:
            return f"{text}, on {ranks_in_words(self.suspects)}"
        return f"{text}, on one of {ranks_in_words(self.suspects)}" if self.suspects else text


def _not_finite(spike: Spike) -> tuple[str, ...]:
    numbers = ("finite" if math.isfinite(value) else str(value) for value in (spike.loss, spike.norm))
    return (*numbers, spike.where)


def suspects(layout: Layout, losing: Sequence[int]) -> tuple[int, ...]:
    """Return the ranks that compute a part of the loss of a rank in `losing`. Empty if that could be any rank: with
    `ep`, where ranks compute each other's tokens, or if `losing` is empty."""
    if layout.ep > 1 or not losing:
        return ()
    data_ranks = {layout.data_rank(rank) for rank in losing}
    return tuple(rank for rank in range(layout.world_size) if layout.data_rank(rank) in data_ranks)


class SpikeGuard:
    """Judges each step of a run, identically on every rank."""

    def __init__(self, config: FaultsSection, model: ParallelModel, device: torch.device) -> None:
        self.config, self.model = config, model
        self.state = SpikeState()
        self._loss_part: Tensor | None = None
        self.seen: Spike | None = None
        """The last step's spike, or None."""
        self.recheck: Recheck | None = None
        """The last step's recheck if it was run again, otherwise None."""
        self._first: Spike | None = None
        """The first try's spike of a step that is to be run again."""
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._sums: Tensor | None = None
        self._ready: Any = None

    def resume(self, state: SpikeState) -> None:
        """Continue with the state from a checkpoint."""
        self.state = state

    def start(self, loss_part: Tensor, norm: Tensor) -> None:
        """Start to sum the numbers by which the step is judged: this rank's part of the loss, and the gradient norm,
        which is equal on every rank."""
        self._loss_part = loss_part
        # Ranks of tp compute the same part of the loss.
        parts = [loss_part.double() / self.model.layout.tp, norm.double() / dist.get_world_size()]
        sums = torch.stack(parts)
        work = dist.all_reduce(sums, async_op=True)
        if self._stream is None:
            self._sums, self._ready = sums, work.wait
            return
        with torch.cuda.stream(self._stream):
            work.wait()
            self._sums = torch.empty(sums.shape, dtype=sums.dtype, pin_memory=True)
            self._sums.copy_(sums, non_blocking=True)
            copied = torch.cuda.Event()
            copied.record()
        sums.record_stream(self._stream)
        self._ready = copied.synchronize

    @property
    def doubts(self) -> bool:
        """Return whether the step that was just refused should be run again before any policy applies."""
        return self._first is not None

    def pass_over(self) -> None:
        """Record that a step was not computed because none of its tokens counts. There is nothing to judge."""
        self._first, self.recheck, self.seen = None, None, None

    def takes(self, overflowed: bool = False) -> bool:
        """Return whether the step of the last `start` call may change weights, and set `seen`. `overflowed`: a
        gradient overflowed in fp16. The loss scale handles that, so the step is not judged."""
        assert self._sums is not None
        self._ready()
        loss, norm = self._sums.tolist()
        self._sums = self._ready = None
        first, self._first, self.recheck, self.seen = self._first, None, None, None
        if overflowed:
            return False
        self.seen = self._spike(loss, norm)
        if first is not None:
            self.recheck = Recheck(first, self.seen, loss, norm, suspects(self.model.layout, first.losing))
        elif self.config.recheck and self.seen is not None and not self.seen.finite:
            self._first = self.seen
            return False
        if self.seen is None:
            self.state.in_a_row = 0
            return True
        self.state.in_a_row += 1
        self.state.skipped += 1
        return False

    def _spike(self, loss: float, norm: float) -> Spike | None:
        """Return the spike if a step with these numbers is one, otherwise None. Every rank calls this."""
        why = self.judge(loss, norm)
        if why is None or (math.isfinite(loss) and math.isfinite(norm)):
            return None if why is None else Spike(loss, norm, why)
        gradients = [(k, p.grad) for k, p in self.model.named_parameters.items() if p.grad is not None]
        bad = [name for name, gradient in gradients if not bool(torch.isfinite(local_part(gradient)).all())]
        assert self._loss_part is not None
        where, losing = origin(self.model, not bool(torch.isfinite(self._loss_part)), bad)
        return Spike(loss, norm, why, where, losing)

    def judge(self, loss: float, norm: float) -> str | None:
        """Return why a step with these numbers is a spike, or None. Finite numbers are added to the windows."""
        state, reason = self.state, None
        for name, value, window in (("loss", loss, state.losses), ("gradient norm", norm, state.norms)):
            if not math.isfinite(value):
                reason = reason or f"the {name} is {value}"
            elif len(window) >= LEAST_WINDOW:
                mean, deviation = fmean(window), stdev(window)
                limit = mean + self.config.spike_sigma * deviation
                if value > limit:
                    reason = reason or (
                        f"the {name} {value:.6g} is above {mean:.6g} + {self.config.spike_sigma:g} x {deviation:.3g} = "
                        f"{limit:.6g}, the mean and {self.config.spike_sigma:g} standard deviations of "
                        f"{len(window)} steps"
                    )
        if math.isfinite(loss) and math.isfinite(norm):
            for value, window in ((loss, state.losses), (norm, state.norms)):
                window.append(value)
                del window[:-SPIKE_WINDOW]
        return reason


def origin(model: ParallelModel, loses: bool, bad: Iterable[str]) -> tuple[str, tuple[int, ...]]:
    """Return a description of the origin of non-finite numbers, and the ranks whose part of the loss is not finite.
    Every rank calls this. `loses`: whether this rank's part is not finite. `bad`: the parameters whose gradient in
    this rank's shard has such a number."""
    names = list(model.held_on)
    place = {name: i for i, name in enumerate(names)}
    by_rank = gathered((loses, max((place[name] for name in bad), default=-1)), tuple[bool, int])
    return in_words(by_rank, names), tuple(rank for rank, (loses, _) in enumerate(by_rank) if loses)


def in_words(by_rank: Sequence[tuple[bool, int]], names: Sequence[str]) -> str:
    """Describe the origin of non-finite numbers. `by_rank`: for each rank, whether its part of the loss is not finite,
    and the index of the last name with a non-finite gradient, or -1. `names`: parameters in order of the forward
    pass."""
    parts = []
    if losing := [rank for rank, (loss, _) in enumerate(by_rank) if loss]:
        parts.append(f"the loss is not finite on {ranks_in_words(losing)}")
    first = max(i for _, i in by_rank)
    if first >= 0:
        holding = [rank for rank, (_, i) in enumerate(by_rank) if i == first]
        parts.append(
            f"the first gradient that is not finite, in the order of the backward pass, belongs to {names[first]} on "
            f"{ranks_in_words(holding)}"
        )
    return "; ".join(parts)


def spike_guard(config: FaultsSection, model: ParallelModel, device: torch.device) -> SpikeGuard | None:
    """Return the spike guard of a run, or None if `faults.spike` is "off"."""
    return None if config.spike == "off" else SpikeGuard(config, model, device)
