"""The constants of the cost model that are fitted to measured runs, such as sustained fractions of peak rates.

hardware.toml has the figures of data sheets; these constants are in no data sheet. `benchmarks/calibrate.py` fits them
and writes calibration.toml: one set fitted to all sources of measurements, with one number for each accelerator or
software stack where it depends on it, and for each source a set fitted to the other sources only.
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
    """`product_share`, by accelerator: fraction of the best measured matmul rate that matmuls sustain in training, with
    clocks limited by power. `flash_share`, by accelerator: fraction of that rate that fused attention reaches in the
    forward pass. `ramp_k`, `partial_wave`: see `matmuls.Matmul.seconds`. `flash_width`: head width at which fused
    attention reaches half of its rate for wide heads. `memory_share`: fraction of the bandwidth of a large copy that
    element-wise kernels reach. `score_bytes`, `score_bytes_backward`: bytes moved for each stored score of attention.
    `straggler_share`: relative increase of the step time for each doubling of nodes, as all ranks wait for the slowest.
    `stacks`: fields of `Speed`, by its `kind`.

    The entry "others" holds for accelerators without fitted numbers.
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

    def matmuls(self, accelerator: str) -> float:
        """`product_share` of one accelerator."""
        return self.product_share.get(accelerator, self.product_share[OTHERS])

    def flash(self, accelerator: str) -> float:
        """`flash_share` of one accelerator."""
        return self.flash_share.get(accelerator, self.flash_share[OTHERS])


def read(path: Path = PACKAGED) -> tuple[Calibration, dict[str, Calibration]]:
    """The constants, and for each source those that were fitted without it."""
    with path.open("rb") as file:
        document = tomllib.load(file)
    left_out: dict[str, dict[str, Any]] = document.pop("left_out", {})
    return Calibration(**document), {source: Calibration(**values) for source, values in left_out.items()}


CALIBRATED, LEFT_OUT = read()
