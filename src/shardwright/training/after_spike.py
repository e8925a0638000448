"""What a run does after a step that was a spike, or that was run again: faults.spike, carried out and told."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn, Protocol

from shardwright.config.faults import IN_A_ROW, FaultsSection
from shardwright.data.batches import merged
from shardwright.data.mixture import MixtureOrder, Stage
from shardwright.errors import SpikeError
from shardwright.processes import ranks_in_words
from shardwright.run_folder import EVENTS, EventKind, SamplePlace
from shardwright.training.screen import Screen
from shardwright.training.sources import Sources
from shardwright.training.spikes import Spike
from shardwright.training.step import Trainer

PLACES_SHOWN = 4
"""Of the samples of a step, so many are told with where they are in the data."""


class Happened(Protocol):
    """Notes an event that every rank knows of, of these fields."""

    def __call__(
        self, kind: EventKind, step: int, text: str, rank: int | None = None, samples: Sequence[SamplePlace] = ()
    ) -> None: ...


@dataclass(frozen=True)
class Start:
    """Where a run begins: steps taken and samples consumed so far, the checkpoint that was loaded, and the stages of
    the mixture that had begun."""

    step: int = 0
    samples: int = 0
    checkpoint: Path | None = None
    past: Sequence[Stage] = ()


class AfterSpike:
    """Decides, the same on every rank, what becomes of a run after each step that was not as it should be."""

    def __init__(self, config: FaultsSection, trainer: Trainer, sources: Sources, happened: Happened) -> None:
        self.policy, self.trainer, self.sources, self._happened = config.spike, trainer, sources, happened
        self.left_out: list[tuple[int, int]] = []
        """Ranges of running samples that the run does not train on, of spikes that it went back from."""
        self._went_back: dict[int, int] = {}
        """Step of a checkpoint -> how often this process went back to it."""

    def leave_out(self, ranges: Iterable[tuple[int, int]]) -> None:
        """Do not train on these ranges of running samples (first, one after the last)."""
        self.left_out = merged([*self.left_out, *ranges])

    def rechecked(self, step: int, screen: Screen) -> None:
        """Tell of step number `step` if it was run again and gave another result: a fault of a device."""
        recheck = self.trainer.recheck
        if recheck is None or recheck.same:
            return
        told = f"step {step}: {recheck.first}; {recheck}"
        if recheck.second is None:
            told += "; the step is taken with the second result. Have that device checked, or leave it out"
        screen.say(told)
        self._happened("fault", step, told, recheck.suspects[0] if len(recheck.suspects) == 1 else None)

    def next(
        self,
        spike: Spike,
        step: int,
        samples: tuple[int, int],
        order: MixtureOrder,
        newest_checkpoint: Callable[[], Start | None],
        screen: Screen,
    ) -> Start | None:
        """What faults.spike says of step number `step`, which was not taken; where the run begins again if it goes back
        to a checkpoint, which `newest_checkpoint` loads. Raises SpikeError where it stops. `samples`: the first of the
        step, and the one after its last."""
        told, places = self._described(spike, step, samples, order)
        assert self.trainer.spikes is not None
        in_a_row = self.trainer.spikes.state.in_a_row
        back = None
        if self.policy == "rollback":
            self.leave_out([samples])
            back = newest_checkpoint()
        if back is not None:
            in_a_row = self._went_back[back.step] = self._went_back.get(back.step, 0) + 1
        if self.policy == "stop" or in_a_row >= IN_A_ROW:
            if self.policy != "stop":
                told += f"; these are {in_a_row} spikes in a row, and {IN_A_ROW} stop a run"
            self._happened("spike", step, told, samples=places)
            raise SpikeError(f"{told}\nthe step was not taken: weights and checkpoints are those from before it")
        if back is None:
            none = "; there is no checkpoint to go back to yet" if self.policy == "rollback" else ""
            told = f"{told}; skipped, weights and optimizer states stay{none}"
        else:
            told = (
                f"{told}; back to {back.checkpoint} (step {back.step}), from now on without samples {samples[0]} to "
                f"{samples[1] - 1}"
            )
        screen.say(told)
        self._happened("skip" if back is None else "rollback", step, told, samples=places)
        return back

    def stop(self, spike: Spike, step: int, samples: tuple[int, int], order: MixtureOrder, done: int) -> NoReturn:
        """Raise SpikeError for step number `step`, whose loss or gradient norm is not finite, after `done` steps."""
        told, places = self._described(spike, step, samples, order)
        self._happened("spike", step, told, samples=places)
        seen = "" if done == step else f" (found after step {done})"
        raise SpikeError(
            f"{told}\nthe run is stopped{seen}: checkpoints are those from before step {step}, none holds its numbers. "
            f"To leave such steps out, set faults.spike to 'skip' or 'rollback'; if it is the first of many, lower "
            f"optimizer.lr or optimizer.clip_norm"
        )

    def _described(
        self, spike: Spike, step: int, samples: tuple[int, int], order: MixtureOrder
    ) -> tuple[str, list[SamplePlace]]:
        """A step that is not as it should be in words, and the places of its samples in the data."""
        told = f"step {step}: {spike}"
        if self.trainer.recheck is not None:
            told += f"; {self.trainer.recheck}"
        there = [i for i in range(*samples) if not any(first <= i < end for first, end in self.left_out)]
        places = self.sources.places(order, there)
        return f"{told}; {self._in_words(places, spike.losing)}", places

    def _in_words(self, places: Sequence[SamplePlace], losing: Sequence[int]) -> str:
        """The samples of a step, or of them those of the ranks with a loss that is not finite, as far as they are few;
        `events.jsonl` has all."""
        layout = self.trainer.model.layout
        data_ranks = {layout.data_rank(rank) for rank in losing}
        block = len(places) // layout.data_ranks
        suspected = [each for n, each in enumerate(places) if n // block in data_ranks]
        shown, of = (suspected, f" of {ranks_in_words(losing)}") if suspected else (places, "")
        told = "; ".join(f"{each.sample}: {each}" for each in shown[:PLACES_SHOWN])
        more = f" and {len(shown) - PLACES_SHOWN} more, in {EVENTS}" if len(shown) > PLACES_SHOWN else ""
        return f"its samples{of} are {told}{more}"
