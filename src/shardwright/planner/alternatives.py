"""Alternatives to the recommended layout: the best layout of each other kind, priced by the same cost model."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from shardwright.cost.job import COLUMNS, Candidates
from shardwright.layout.box import DENSE_AXES
from shardwright.layout.keys import KEYS
from shardwright.planner.choice import Choice, PricedLayout
from shardwright.planner.search import Plan, survey
from shardwright.planner.space import Condition, Mask
from shardwright.schedule.named import INTERLEAVED, ONE_F_ONE_B

_SIDES = [name for name, key in KEYS.items() if key.runner_up]
SIDES = (
    *(name for name in _SIDES if name in (*COLUMNS, "pp")),
    "micro_batch",
    *(name for name in _SIDES if name not in (*COLUMNS, "pp")),
)
"""Choices whose runner-up (the best layout with another value) is shown: numbers first, then words."""
SHOWN = 0.0005
"""Relative difference of step times below which a row would show +0.0 %."""


def slower_in_words(slower: float) -> str:
    """Return a relative difference of step times as text: `+38.0%`, or `as fast` within rounding."""
    return "as fast" if _rounds_to_zero(slower) else f"{slower:+.1%}"


def _rounds_to_zero(slower: float) -> bool:
    return abs(slower) < SHOWN


@dataclass(frozen=True)
class Alternative:
    """The best layout of a kind. `name`: the kind. `priced`: None if no layout of the kind fits; `nearest` is then the
    layout that needs the least memory, with its bytes."""

    name: str
    priced: PricedLayout | None
    nearest: tuple[Choice, float] | None

    @property
    def choice(self) -> Choice:
        """Return the layout, whether it fits or not."""
        if self.priced is not None:
            return self.priced.choice
        assert self.nearest is not None
        return self.nearest[0]

    def as_fast(self, best: PricedLayout) -> bool:
        """Return whether its step is as fast as the best layout's in the digits that are shown."""
        slower = self.slower(best)
        return slower is not None and _rounds_to_zero(slower)

    def slower(self, best: PricedLayout) -> float | None:
        """Return the step time relative to the best layout's, less 1; None if no layout of the kind fits."""
        return None if self.priced is None else self.priced.step_s / best.step_s - 1


def runners_up(plan: Plan) -> list[Alternative]:
    """Return, for each choice, the best layout with another value of it: another tp, another pp, ..."""
    assert plan.recommended is not None
    return list(_evaluated(plan, _sides(plan.recommended.choice.candidates)))


def well_known(plan: Plan) -> list[Alternative]:
    """Return the best layout of each well-known kind (DDP, FSDP, HSDP, Megatron-LM) except the recommended layout's."""
    assert plan.recommended is not None
    taken = plan.recommended.choice.candidates
    return list(_evaluated(plan, [kind for kind in _recipes(plan.job.cluster.node_size) if not kind.meets(taken)[0]]))


def reasons(best: PricedLayout, other: PricedLayout, most: int = 3) -> list[tuple[str, float]]:
    """Return the kinds of work on which another layout spends more time than the best, with the additional seconds, the
    largest first. Kinds below a tenth of the difference are left out."""
    worth = max(0.1 * abs(other.step_s - best.step_s), 1e-9)
    return [(kind, seconds) for kind, seconds in _changes(best, other) if seconds > worth][:most]


def savings(best: PricedLayout, other: PricedLayout) -> list[tuple[str, float]]:
    """Return the kinds of work on which another layout is faster than the best, with seconds below 0, most first.
    Savings up to a fifth of the difference are left out; larger ones are needed for the terms to add up."""
    worth = max(0.2 * abs(other.step_s - best.step_s), 1e-9)
    return [(kind, seconds) for kind, seconds in reversed(_changes(best, other)) if -seconds > worth]


def _changes(best: PricedLayout, other: PricedLayout) -> list[tuple[str, float]]:
    """Return the additional seconds of each kind of work, the largest first; they add up to the difference."""
    theirs, ours = other.parts_s, best.parts_s
    more = {kind: theirs.get(kind, 0.0) - ours.get(kind, 0.0) for kind in {**theirs, **ours}}
    return sorted(more.items(), key=lambda item: -item[1])


@dataclass(frozen=True)
class _LayoutKind:
    """Layouts that meet a condition and, if `pp` is given, have pipelines of `pp` ranks."""

    name: str
    condition: Condition
    pp: int | None = None

    def meets(self, candidates: Candidates) -> Mask:
        """Return the mask of the candidates that are of this kind."""
        return self.condition(candidates) & (self.pp in (None, candidates.pp))


def _sides(best: Candidates) -> Iterator[_LayoutKind]:
    for side in SIDES:
        if side in COLUMNS:
            yield _LayoutKind(f"another {side}", _differs(side, getattr(best, side)[0]))
        elif KEYS[side].used(best) or side in DENSE_AXES:
            yield _LayoutKind(f"another {side}", _differs_shared(side, getattr(best.shared, side)))


def _differs(side: str, value: int) -> Condition:
    return lambda candidates: getattr(candidates, side) != value


def _differs_shared(side: str, value: Any) -> Condition:
    """Select another value of a key, only where the key is used: plain 1f1b is no other schedule without a pipeline."""

    def condition(candidates: Candidates) -> Mask:
        differs = getattr(candidates.shared, side) != value and (
            side in DENSE_AXES or KEYS[side].used(candidates.shared)
        )
        return np.full(len(candidates), differs)

    return condition


def _recipes(node: int) -> Iterator[_LayoutKind]:
    def alone(candidates: Candidates) -> Mask:
        return (candidates.tp == 1) & (candidates.cp == 1)

    yield _LayoutKind(
        "zero 0 alone: everything replicated (DDP)",
        lambda candidates: alone(candidates) & (candidates.zero == 0),
        pp=1,
    )
    yield _LayoutKind(
        "zero 1 alone: optimizer states sharded",
        lambda candidates: alone(candidates) & (candidates.zero == 1) & (candidates.dp_replicate == 1),
        pp=1,
    )
    yield _LayoutKind(
        "zero 3 alone: everything sharded (FSDP)",
        lambda candidates: alone(candidates) & (candidates.zero == 3) & (candidates.dp_replicate == 1),
        pp=1,
    )
    yield _LayoutKind(
        "zero 3 within a node, replicas across nodes (HSDP)",
        lambda candidates: (
            alone(candidates) & (candidates.zero == 3) & (candidates.dp_shard == node) & (candidates.dp_replicate > 1)
        ),
        pp=1,
    )
    yield _LayoutKind(
        "tp = a node, then pp with (interleaved) 1f1b, zero 1 (Megatron-LM)",
        lambda candidates: (
            (candidates.tp == node)
            & (candidates.cp == 1)
            & (candidates.zero <= 1)
            & (candidates.pp > 1 and candidates.shared.pp_schedule in (ONE_F_ONE_B.name, INTERLEAVED.name))
        ),
    )
    yield _LayoutKind("tp across nodes", lambda candidates: candidates.tp > node)
    yield _LayoutKind("no recomputation", lambda candidates: candidates.recompute == 0)
    yield _LayoutKind("selective recomputation", lambda candidates: candidates.recomputes_parts)
    yield _LayoutKind("full recomputation", lambda candidates: candidates.recomputes & ~candidates.recomputes_parts)
    yield _LayoutKind("no pipeline", lambda candidates: np.full(len(candidates), True), pp=1)
    yield _LayoutKind(
        "plain 1f1b",
        lambda candidates: np.full(
            len(candidates), candidates.pp > 1 and candidates.shared.pp_schedule == ONE_F_ONE_B.name
        ),
    )


def _both(kind: Condition, fixed: Condition | None) -> Condition:
    return kind if fixed is None else lambda candidates: kind(candidates) & fixed(candidates)


def _evaluated(plan: Plan, kinds: Iterable[_LayoutKind]) -> Iterator[Alternative]:
    """Yield the best layout of each kind; skip a kind that has no layout, or none with the plan's fixed values."""
    for kind in kinds:
        condition = _both(kind.meets, plan.fixed)
        fastest = plan.pool.fastest(1, plan.pool.where(condition))
        if fastest:
            yield Alternative(kind.name, PricedLayout.from_choice(plan.job, plan.pool.choice(fastest[0])), None)
            continue
        surveyed = survey(plan.job, plan.limit_bytes, condition, pp=kind.pp)
        if surveyed.nearest is not None:
            yield Alternative(kind.name, None, (surveyed.nearest, surveyed.nearest_bytes))
