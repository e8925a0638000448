"""The learning rate of each step, as a function of the step alone."""

import math

from shardwright.config import ScheduleSection


def learning_rate(step: int, steps: int, peak: float, schedule: ScheduleSection) -> float:
    """Return the learning rate of step `step` (0-based) of `steps`.

    Linear warm-up over W = warmup_steps: peak * (step + 1) / W. Then, with f = final_fraction:
    - cosine (arXiv 1608.03983, one period): peak * (f + (1 - f) * (1 + cos(pi * x)) / 2), x from 0 at the end of the
      warm-up to 1 at the last step;
    - wsd (warm-up, stable, decay; arXiv 2404.06395): peak, then linear to f * peak over the last decay_steps;
    - constant: peak.
    """
    if step < schedule.warmup_steps:
        return peak * (step + 1) / schedule.warmup_steps
    final = schedule.final_fraction
    if schedule.shape == "cosine":
        done = (step - schedule.warmup_steps) / max(1, steps - 1 - schedule.warmup_steps)
        return peak * (final + (1 - final) * (1 + math.cos(math.pi * min(1.0, done))) / 2)
    if schedule.shape == "wsd" and schedule.decay_steps:
        left = steps - 1 - step
        return peak * (final + (1 - final) * min(1.0, left / schedule.decay_steps))
    return peak
