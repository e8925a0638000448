"""Loss spikes and numbers that are not finite, found by all ranks together before any weight changes.

Rule, as in OLMo-core's SkipStepOptimizer: with the losses and the gradient norms of the last 128 steps, once there are
64, a step is a spike if its loss or its norm is above mean + spike_sigma x standard deviation of its window. Unlike
there, a value that is not finite never enters a window (one NaN would make the standard deviation NaN for 128 steps),
and is a spike from the first step on. Finite values of spikes enter, so that a lasting change of level is learned.

All ranks judge the same two numbers, the sums over the world of one all-reduce: of the ranks' parts of the loss, and of
their gradient norms over the world size. So they agree to the last bit, and a NaN on one rank is a NaN on all.

With `faults.recheck` a step whose numbers are not finite is run again in place, with the same samples, weights and
random numbers, as in the rerun state machine of Megatron-LM: another result is that of a faulty device, the same one
comes from the data or the model. Nothing but this verdict is kept of the first try.

The numbers are read back while the device clips gradients: on a GPU a stream of its own copies them, and the host waits
for that copy alone, so the device has work queued until the optimizer's is.
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
    """What a checkpoint holds: loss and gradient norm of the last steps, `in_a_row` spikes since the last step that was
    taken, `skipped` steps of the run."""

    losses: Window = field(default_factory=list)
    norms: Window = field(default_factory=list)
    in_a_row: Count = 0
    skipped: Count = 0


@dataclass(frozen=True)
class Spike:
    """A step that was found to be a spike. `why`: which number broke the rule, with the rule's own numbers; `where`:
    the ranks and the parameter that it comes from, if a number is not finite; `losing`: the ranks whose part of the
    loss is not finite."""

    loss: float
    norm: float
    why: str
    where: str = ""
    losing: tuple[int, ...] = ()

    @property
    def finite(self) -> bool:
        """Whether both numbers are."""
        return math.isfinite(self.loss) and math.isfinite(self.norm)

    def __str__(self) -> str:
        told = f"{self.why} (loss {self.loss:.6g}, gradient norm {self.norm:.6g})"
        return f"{told}; {self.where}" if self.where else told


@dataclass(frozen=True)
class Recheck:
    """Two tries of one step: `first` gave a number that is not finite, `second` is None if the step can be taken with
    what the second try gave, `loss` and `norm`. `suspects`: the ranks of which one has the faulty device, if the tries
    differ and it is known."""

    first: Spike
    second: Spike | None
    loss: float
    norm: float
    suspects: tuple[int, ...] = ()

    @property
    def same(self) -> bool:
        """Whether the same numbers are not finite in both, on the same ranks, from the same parameter on. Finite ones
        are not compared: kernels of GPUs may add in another order each time."""
        return self.second is not None and _not_finite(self.first) == _not_finite(self.second)

    def __str__(self) -> str:
        if self.same:
            return "run again with the same samples and weights it gave the same: the data or the model, not a device"
        result = self.second or f"loss {self.loss:.6g}, gradient norm {self.norm:.6g}"
        told = f"run again with the same samples and weights it gave another result ({result}): a faulty device"
        if len(self.suspects) == 1:
            return f"{told}, that of {ranks_in_words(self.suspects)}"
        return f"{told}, one of those of {ranks_in_words(self.suspects)}" if self.suspects else told


def _not_finite(spike: Spike) -> tuple[str, ...]:
    numbers = ("finite" if math.isfinite(value) else str(value) for value in (spike.loss, spike.norm))
    return (*numbers, spike.where)


def suspects(layout: Layout, losing: Sequence[int]) -> tuple[int, ...]:
    """The ranks that compute a part of the loss of one of the ranks `losing`; none where these may be all: with `ep`,
    whose ranks compute tokens of each other, and where no loss tells of it."""
    if layout.ep > 1 or not losing:
        return ()
    data_ranks = {layout.data_rank(rank) for rank in losing}
    return tuple(rank for rank in range(layout.world_size) if layout.data_rank(rank) in data_ranks)


class SpikeGuard:
    """Judges each step of a run, the same on every rank."""

    def __init__(self, config: FaultsSection, model: ParallelModel, device: torch.device) -> None:
        self.config, self.model = config, model
        self.state = SpikeState()
        self._loss_part: Tensor | None = None
        self.seen: Spike | None = None
        """The last step, if it was a spike."""
        self.recheck: Recheck | None = None
        """Of the last step, if it was run again."""
        self._first: Spike | None = None
        """What the first try gave of a step that is to be run again."""
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._sums: Tensor | None = None
        self._ready: Any = None

    def resume(self, state: SpikeState) -> None:
        """Continue with the state that a checkpoint contains."""
        self.state = state

    def start(self, loss_part: Tensor, norm: Tensor) -> None:
        """Start to sum the numbers that the step is judged by: this rank's part of the loss, and the norm of the
        gradients, which is equal on every rank."""
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
        """Whether the step that was not taken just now is to be run again before anything is made of it."""
        return self._first is not None

    def pass_over(self) -> None:
        """A step was not computed, as none of its tokens counts: there is nothing to judge."""
        self._first, self.recheck, self.seen = None, None, None

    def takes(self, overflowed: bool = False) -> bool:
        """Whether the step that `start` was called for may change weights; `seen` is what was found. `overflowed`: a
        gradient did in fp16, which the loss scale is there for, so the step is not judged."""
        assert self._sums is not None
        self._ready()
        loss, norm = self._sums.tolist()
        self._sums = self._ready = None
        first, self._first, self.recheck, self.seen = self._first, None, None, None
        if overflowed:
            return False
        self.seen = self._found(loss, norm)
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

    def _found(self, loss: float, norm: float) -> Spike | None:
        """The spike that a step with these numbers is, if it is one. Every rank calls this."""
        why = self.judge(loss, norm)
        if why is None or (math.isfinite(loss) and math.isfinite(norm)):
            return None if why is None else Spike(loss, norm, why)
        held = [(k, p.grad) for k, p in self.model.named_parameters.items() if p.grad is not None]
        bad = [name for name, gradient in held if not bool(torch.isfinite(local_part(gradient)).all())]
        assert self._loss_part is not None
        where, losing = origin(self.model, not bool(torch.isfinite(self._loss_part)), bad)
        return Spike(loss, norm, why, where, losing)

    def judge(self, loss: float, norm: float) -> str | None:
        """Why a step with these numbers is a spike, if it is one; they enter the window."""
        state, found = self.state, None
        for name, value, window in (("loss", loss, state.losses), ("gradient norm", norm, state.norms)):
            if not math.isfinite(value):
                found = found or f"the {name} is {value}"
            elif len(window) >= LEAST_WINDOW:
                mean, deviation = fmean(window), stdev(window)
                limit = mean + self.config.spike_sigma * deviation
                if value > limit:
                    found = found or (
                        f"the {name} {value:.6g} is above {mean:.6g} + {self.config.spike_sigma:g} x {deviation:.3g} = "
                        f"{limit:.6g}, the mean and {self.config.spike_sigma:g} standard deviations of "
                        f"{len(window)} steps"
                    )
        if math.isfinite(loss) and math.isfinite(norm):
            for value, window in ((loss, state.losses), (norm, state.norms)):
                window.append(value)
                del window[:-SPIKE_WINDOW]
        return found


def origin(model: ParallelModel, loses: bool, bad: Iterable[str]) -> tuple[str, tuple[int, ...]]:
    """Where numbers that are not finite come from, in words, and the ranks whose part of the loss is not finite. Every
    rank calls this. `loses`: whether this rank is one of them; `bad`: the parameters whose gradient has such a number
    in this rank's shard."""
    names = list(model.held_on)
    place = {name: i for i, name in enumerate(names)}
    found = gathered((loses, max((place[name] for name in bad), default=-1)), tuple[bool, int])
    return in_words(found, names), tuple(rank for rank, (loses, _) in enumerate(found) if loses)


def in_words(found: Sequence[tuple[bool, int]], names: Sequence[str]) -> str:
    """`found`: of each rank whether its part of the loss is not finite, and the last of `names`, those of parameters in
    the order of the forward pass, whose gradient is not; -1 for none."""
    told = []
    if losing := [rank for rank, (loss, _) in enumerate(found) if loss]:
        told.append(f"the loss is not finite on {ranks_in_words(losing)}")
    first = max(i for _, i in found)
    if first >= 0:
        holding = [rank for rank, (_, i) in enumerate(found) if i == first]
        told.append(
            f"the first gradient that is not finite, in the order of the backward pass, is that of {names[first]} on "
            f"{ranks_in_words(holding)}"
        )
    return "; ".join(told)


def spike_guard(config: FaultsSection, model: ParallelModel, device: torch.device) -> SpikeGuard | None:
    """That of a run; None where nothing is to be done about spikes."""
    return None if config.spike == "off" else SpikeGuard(config, model, device)
