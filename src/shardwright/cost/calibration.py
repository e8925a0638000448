"""The constants of the cost model that are fitted to measured runs, such as sustained fractions of peak rates.

hardware.toml has the figures of data sheets; these constants are in no data sheet. `benchmarks/calibrate.py` fits them
and writes calibration.toml: one set fitted to all sources of measurements, with a number for each die or software
stack if a constant depends on it, and for each family of runs a set fitted to the other families only.
"""

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

PACKAGED = Path(__file__).with_name("calibration.toml")
OTHERS = "others"
NARROW = ("fp8", "mxfp8", "nvfp4")
"""Formats of fewer than 16 bits."""


@dataclass(frozen=True)
class Calibration:
    """`product_share`, by die and format: fraction of the best measured matmul rate that matmuls sustain in training,
    with clocks limited by power; fp8 stands for all formats of fewer than 16 bits, bf16 for the others. `flash_share`,
    by die: fraction of the rate in 16 bits that fused attention of PyTorch of 2023 reaches in the forward pass.
    `flash_width`, `flash_length`: head width, and sequence length, at which it reaches half of that. `flash_backward`:
    time of its backward pass relative to the forward pass: five matmuls instead of two (Dao, arXiv 2307.08691, section
    3), at 0.85 of the rate (figures 5 and 6 there). `ramp_k`,
    `partial_wave`: see `matmuls.Matmul.seconds`. `memory_share`: fraction of the bandwidth of a large copy that
    element-wise kernels reach. `score_bytes`, `score_bytes_backward`: bytes moved for each stored score of attention.
    `straggler_share`: relative increase of the step time for each doubling of nodes, as all ranks wait for the slowest.
    `expert_launches`: launches of a layer with experts relative to a dense one: it also has a router, sorting and
    all-to-alls. `host`: fields of `Speed` that are the host's, the same for every kind; `stacks`: others, by kind.
    `interval`: widths of the intervals of step times (`planner.headline`). `difference`: error of the difference of two
    step times on one cluster (`planner.recommendation`).
    `covariance`: rows of the covariance of the constants that training logs of the cluster calibrated (`cost.machine`);
    empty without logs. `software`: kinds of `Speed` of the runs to which the constants were fitted.
    `attention_time`: factor by which attention takes longer than its rate relative to matmuls says, by training logs.
    The entry "others" holds for dies without fitted numbers.
    """

    product_share: Mapping[str, Mapping[str, float]] = field(hash=False)
    flash_share: Mapping[str, float] = field(hash=False)
    ramp_k: float
    partial_wave: float
    flash_width: float
    flash_length: float
    memory_share: float
    score_bytes: float
    score_bytes_backward: float
    straggler_share: float
    expert_launches: float
    host: Mapping[str, float] = field(hash=False)
    stacks: Mapping[str, Mapping[str, float]] = field(hash=False)
    interval: Mapping[str, float] = field(hash=False)
    difference: Mapping[str, float] = field(default_factory=dict, hash=False)
    flash_backward: float = 2.5 / 0.85
    covariance: Mapping[str, tuple[float, ...]] = field(default_factory=dict, hash=False)
    software: Sequence[str] = field(default=(), hash=False)
    attention_time: float = 1.0

    def matmuls(self, die: str, peak: str) -> float:
        """Return `product_share` of a die, for a format that runs at the peak of `peak`."""
        shares = self.product_share.get(die, self.product_share[OTHERS])
        return shares["fp8" if "fp8" in shares and peak in NARROW else "bf16"]

    def flash(self, die: str) -> float:
        """Return `flash_share` of one die."""
        return self.flash_share.get(die, self.flash_share[OTHERS])


def read(path: Path = PACKAGED) -> tuple[Calibration, dict[str, Calibration]]:
    """Return the constants, and for each family the constants that were fitted without it."""
    with path.open("rb") as file:
        document = tomllib.load(file)
    left_out: dict[str, dict[str, Any]] = document.pop("left_out", {})
    return Calibration(**document), {family: Calibration(**values) for family, values in left_out.items()}


CALIBRATED, LEFT_OUT = read()
