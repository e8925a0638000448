"""The section `[average]`: averages of the weights over the steps of a run."""

from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import Field

from shardwright.config.sections import Positive, RunFileSection


class AverageSection(RunFileSection):
    """An average of the weights, which is saved in checkpoints, evaluated and exported next to the weights."""

    kind: Literal["none", "ema", "last-k", "lawa"] = Field(
        "none",
        description="ema: exponential moving average; last-k: the mean of the weights at the last updates of the run; "
        "lawa: the mean of the weights at the latest updates (arXiv 2209.14981), which keeps a copy of each",
    )
    decay: Annotated[float, Field(gt=0, lt=1)] = Field(
        0.999, description="ema only: factor of the average in each update; the weights have 1 - decay"
    )
    every: Positive = Field(1, description="steps between updates of the average")
    last: Annotated[int, Field(ge=2, le=1000)] = Field(5, description="last-k and lawa only: how many updates, k")
    device: Literal["auto", "cpu"] = Field(
        "auto", description="auto: memory of the parameters; cpu: memory of the host, sharded like the parameters"
    )

    @property
    def slots(self) -> tuple[str, ...]:
        """Return the names of the copies of the weights that are kept."""
        if self.kind == "lawa":
            return tuple(str(n) for n in range(self.last))
        return () if self.kind == "none" else ("mean",)

    @property
    def identity(self) -> dict[str, Any] | None:
        """Return the values that a resumed run must have, too; None without an average."""
        names = ("kind", "every", *(name for name, kinds in _USED.items() if self.kind in kinds))
        return None if self.kind == "none" else {name: getattr(self, name) for name in names}

    def update(self, step: int, steps: int) -> tuple[str, float] | None:
        """Return the slot that changes after `step` steps of `steps` and the weight of the parameters in it: the slot
        becomes slot + weight x (parameters - slot). None if nothing changes. A function of the step alone."""
        if self.kind == "none" or step % self.every:
            return None
        n = step // self.every
        if self.kind == "ema":
            return "mean", 1.0 if n == 1 else 1 - self.decay
        if self.kind == "lawa":
            return str((n - 1) % self.last), 1.0
        n -= self._skipped(steps)
        return ("mean", 1 / n) if n > 0 else None

    def parts(self, step: int, steps: int) -> dict[str, float]:
        """Return the weight of each slot in the average after `step` steps; empty before the first update."""
        n = step // self.every - self._skipped(steps)
        if self.kind == "none" or n < 1:
            return {}
        slots = self.slots[:n]
        return dict.fromkeys(slots, 1 / len(slots))

    def first_step(self, steps: int) -> int:
        """Return the step after which there is an average."""
        return self.every * (1 + self._skipped(steps))

    def _skipped(self, steps: int) -> int:
        """Return the updates before the first one that is part of the average."""
        return max(0, steps // self.every - self.last) if self.kind == "last-k" else 0


def average_problems(average: AverageSection, steps: int | None) -> Iterator[str]:
    """Yield each broken rule on the section. `steps`: steps of the run; None if that value is not valid."""
    for name, kinds in _USED.items():
        value, default = getattr(average, name), AverageSection.model_fields[name].default
        if average.kind not in kinds and value != default:
            yield (
                f"average.{name}={value:g} is for average.kind={' or '.join(map(repr, kinds))}, and kind is "
                f"{average.kind!r}; leave it out, or set the kind"
            )
    if average.kind != "none" and steps is not None and average.every > steps:
        yield (
            f"average.every={average.every} is more than the steps={steps} of the run, so there is no average; valid: "
            f"1 to {steps}"
        )


_USED = {"decay": ("ema",), "last": ("last-k", "lawa")}
"""The kinds of average that a key is for."""
