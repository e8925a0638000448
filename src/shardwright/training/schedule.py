"""The learning rate of each step, as a function of the step alone."""

import math
from collections.abc import Callable

from shardwright.config import ScheduleSection


def learning_rate(
    step: int,
    steps: int,
    peak: float,
    schedule: ScheduleSection,
    progress: Callable[[int], float] = lambda step: step,
) -> float:
    """Return the learning rate of step number `step` (0-based) of `steps`. `progress`: the steps or tokens before a
    step (`RunConfig.clock`), p(step).

    Linear warm-up over W = warmup_steps: peak * p(step + 1) / p(W). Then, with f = final_fraction and the last step
    L = steps - 1:
    - cosine (arXiv 1608.03983, one period): peak * (f + (1 - f) * (1 + cos(pi * x)) / 2), x = (p(step) - p(W)) /
      (p(L) - p(W)), from 0 at the end of the warm-up to 1 at the last step;
    - wsd (warm-up, stable, decay; arXiv 2404.06395): peak, then linear in p to f * peak over the last decay_steps;
    - constant: peak.
    """
    warm, end = schedule.warmup_steps, steps - 1
    if step < warm:
        return peak * progress(step + 1) / progress(warm)
    final = schedule.final_fraction
    if schedule.shape == "cosine":
        done = (progress(step) - progress(warm)) / max(1, progress(end) - progress(warm))
        return peak * (final + (1 - final) * (1 + math.cos(math.pi * min(1.0, done))) / 2)
    if schedule.shape == "wsd" and schedule.decay_steps:
        left = progress(end) - progress(step)
        length = progress(steps) - progress(steps - schedule.decay_steps)
        return peak * (final + (1 - final) * min(1.0, left / length))
    return peak
