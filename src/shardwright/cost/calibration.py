"""What was fitted to measured runs: how much of a peak lasts in training, and how many bytes an operation really moves.

Facts about an accelerator stand in hardware.toml. Here is what no data sheet says. The numbers are in
calibration.toml, which `benchmarks/calibrate.py` writes: one set for all sources of measurements, with one number for
each accelerator and each software stack, and for each source the set that the other sources alone give.
"""

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

PACKAGED = Path(__file__).with_name("calibration.toml")
OTHERS = "others"


@dataclass(frozen=True)
class Calibration:
    """`product_share`, by accelerator: of the best rate seen in a matrix product, what products in training last at;
    clocks fall with power. `flash_share`, by accelerator: what fused attention reaches forward, of the same.
    `ramp_k`, `partial_wave`: see `products`. `flash_width`: width of a head at which fused attention reaches half of
    what it does with a wide one. `memory_share`: of the bandwidth of a large copy, what element-wise kernels reach.
    `score_bytes`, `score_bytes_backward`: moved for each stored score of attention. `straggler_share`: by which a step
    is longer for each doubling of nodes, since all wait for the slowest. `stacks`: fields of `Speed`, by its `kind`.

    An accelerator that nothing was fitted to has the figures under "others".
    """

    product_share: Mapping[str, float] = field(hash=False)
    flash_share: Mapping[str, float] = field(hash=False)
    ramp_k: float
    partial_wave: float
    flash_width: float
    memory_share: float
    score_bytes: float
    score_bytes_backward: float
    straggler_share: float
    stacks: Mapping[str, Mapping[str, float]] = field(hash=False)

    def products(self, accelerator: str) -> float:
        """`product_share` of one accelerator."""
        return self.product_share.get(accelerator, self.product_share[OTHERS])

    def flash(self, accelerator: str) -> float:
        """`flash_share` of one accelerator."""
        return self.flash_share.get(accelerator, self.flash_share[OTHERS])


def read(path: Path = PACKAGED) -> tuple[Calibration, dict[str, Calibration]]:
    """The constants, and by source those that were fitted without it."""
    with path.open("rb") as file:
        document = tomllib.load(file)
    left_out: dict[str, dict[str, Any]] = document.pop("left_out", {})
    return Calibration(**document), {source: Calibration(**values) for source, values in left_out.items()}


CALIBRATED, LEFT_OUT = read()
