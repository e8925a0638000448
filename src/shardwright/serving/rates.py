"""Constants of serving that no data sheet has, by engine and its generation, and by the die of an accelerator.

`benchmarks/fit_serving.py` fits them to published measurements and writes rates.toml. An engine or a die without
numbers of its own uses the numbers called "others".
"""

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import cache
from pathlib import Path
from typing import Any

PACKAGED = Path(__file__).with_name("rates.toml")
OTHERS = "others"


@dataclass(frozen=True)
class Rates:
    """Numbers, or arrays with one for each setting.

    Shares multiply the rates of `cost/hardware.toml`: `matmul_share` the best matmul, `memory_share` the bandwidth of
    reading weights, `expert_share` the bandwidth of reading experts' weights, `cache_share` for the cache in attention,
    `flash_share` the best 16-bit matmul in attention over prompts, `cached_share` the same in attention over the cache
    (small if an engine computes it for each query head alone, outside the matrix units), `link_share` the bandwidth
    inside a node.

    Times in seconds. `layer_s`: for each layer, overhead beyond the computed times (kernels that wait for others, small
    element-wise kernels); `exchange_s`: for a layer with experts in addition (routing, gathering of rows); `reduce_s`:
    for a small all-reduce. `pass_s`: once in each pass over the model (scheduler, start of the graph, sampling);
    `prefill_s`: in addition once in each pass that reads prompts; `launch_s` for each layer, and `expert_launch_s` in
    addition for each with experts: the least that a pass with prompts takes, as its kernels are started one by one,
    without a graph; `request_s`: for each request in a pass. `arrive_s`: from a user's request to the scheduler.
    """

    matmul_share: Any
    memory_share: Any
    cache_share: Any
    flash_share: Any
    cached_share: Any
    expert_share: Any
    layer_s: Any
    pass_s: Any
    prefill_s: Any
    launch_s: Any
    expert_launch_s: Any
    arrive_s: Any
    request_s: Any
    reduce_s: Any
    exchange_s: Any
    link_share: Any


@dataclass(frozen=True, eq=False)
class FittedRates:
    """`engines`: `Rates` by engine. `accelerators`: factors on some rates, by the die of an accelerator. Two are
    compared by identity, because they are keys of caches."""

    engines: Mapping[str, Mapping[str, float]]
    accelerators: Mapping[str, Mapping[str, float]]

    def rates(self, engine: str, die: str) -> Rates:
        """Return the constants of an engine on accelerators with a die."""
        values = dict(self.engines.get(engine, self.engines[OTHERS]))
        for name, factor in self.accelerators.get(die, self.accelerators[OTHERS]).items():
            values[name] *= factor
        return Rates(**values)


RATES = tuple(rate.name for rate in fields(Rates))


@cache
def fitted(path: Path = PACKAGED) -> tuple[FittedRates, dict[str, FittedRates]]:
    """Return the constants, and for each source the constants that were fitted without it."""
    with path.open("rb") as file:
        document = tomllib.load(file)
    left_out = document.pop("left_out", {})
    return FittedRates(**document), {source: FittedRates(**tables) for source, tables in left_out.items()}
