"""Write measurements as a hardware file (`cost.hardware`)."""

import json
import platform
import re
from collections.abc import Iterator, Mapping
from datetime import date

import torch

from shardwright.cost.hardware import packaged_accelerators
from shardwright.cost.hardware_file import VERSION
from shardwright.measuring.fit import (
    copy_bytes_per_s,
    fit_attention,
    fit_cached,
    fit_link,
    fit_matmuls,
    fit_weights,
    kernel_bytes,
)
from shardwright.measuring.points import MachineMeasurements, RankPoints
from shardwright.measuring.whole_steps import holes, in_step
from shardwright.system.units import GiB, MiB
from shardwright.system.version import PACKAGE_VERSION

ASSUMED_GBIT = 10.0
"""Assumed bandwidth of a network that was not measured."""


def hardware_toml(machine: MachineMeasurements, name: str, command: str) -> str:
    """Return a file with the accelerator `name`, its node and its network. `command`: the command that measured it."""
    alone = "\n".join(_lines(machine, name, command, {}))
    factors: dict[int, dict[str, object]] = {
        points.ranks: {
            "holes": holes(alone, name, points.steps),
            "in_step": in_step(alone, name, points.steps, machine.clock),
        }
        for points in machine.ranks
        if points.steps
    }
    return "\n".join(_lines(machine, name, command, factors)) + "\n"


def _lines(
    machine: MachineMeasurements, name: str, command: str, factors: Mapping[int, dict[str, object]]
) -> Iterator[str]:
    most = machine.ranks[-1]
    fits = {points.ranks: rates(points, machine.on_host) for points in machine.ranks}
    yield f"# Written by `{command}`; docs/measure.md describes each figure and its measurement."
    yield from (f"# {remark}" for remark in machine.remarks)
    yield "\n[measured]"
    yield from _pairs(
        version=VERSION, date=date.today().isoformat(), shardwright=PACKAGE_VERSION,
        torch=torch.__version__, python=platform.python_version(), machine=machine.name, clock=machine.clock,
        took_s=round(machine.took_s, 1),
    )  # fmt: skip
    network = name if machine.across else "ethernet"
    gbit_per_s = ASSUMED_GBIT
    if machine.across:
        link = fit_link(machine.across)
        gbit_per_s = link.bytes_per_s * 8 / 1e9
        yield f"\n[networks.{name}]"
        yield from _pairs(
            share=1.0, start_us=link.start_s * 1e6, latency_us=link.latency_s * 1e6, half_mib=link.half_bytes / MiB
        )
    peaks = _peaks(machine, fits)
    yield f"\n[accelerators.{name}]"
    yield from _pairs(
        memory_gib=most.memory_bytes / GiB,
        memory_gb_per_s=copy_bytes_per_s(most.copies) / 1e9,
        memory_share=1.0,
        multiprocessors=1,
        tflops=peaks,
        matmul_share=dict.fromkeys(peaks, 1.0),
        node_size=most.ranks,
        part_of_node=True,
        network=network,
        gbit_per_s=gbit_per_s,
        **({"host_gb_per_s": machine.host_bytes_per_s / 1e9} if machine.host_bytes_per_s else {}),
        disk_gb_per_s=machine.disk_bytes_per_s / most.ranks / 1e9,
        inside=_inside(machine),
        **({"cores": machine.cores} if machine.on_host else {}),
    )
    for ranks, (figures, errors) in fits.items():
        yield f"\n# Mean errors of the fits: {', '.join(f'{what} {error:.0%}' for what, error in errors.items())}."
        yield f"[accelerators.{name}.rates.{ranks}]"
        yield from _pairs(**figures, **{key: factor for key, factor in factors.get(ranks, {}).items() if factor != {}})
    yield f"\n[accelerators.{name}.sources]"
    yield from _pairs(all=f"measured on {machine.name}" + ("" if machine.across else "; the network is assumed"))


def rates(points: RankPoints, on_host: bool) -> tuple[dict[str, object], dict[str, float]]:
    """Return the values of `cost.hardware_file.RatesTable`, and the mean relative errors of the fits."""
    copied = copy_bytes_per_s(points.copies)
    matmuls = fit_matmuls(points.matmuls)
    wide = "fp32" if on_host else "bf16"
    attention = fit_attention(points.attention, matmuls.flops_per_s[wide])
    over = points.overheads
    forward_s = over.layer_s / (1 + over.backward)
    figures: dict[str, object] = {
        "memory_gib": points.memory_bytes / GiB,
        "process_gib": points.process_bytes / GiB,
        "tflops": {form: rate / 1e12 for form, rate in matmuls.flops_per_s.items()},
        "memory_gb_per_s": copied / 1e9,
        "ramp_k": matmuls.ramp_k,
        "partial_wave": matmuls.partial_wave,
        "attention_share": attention.share,
        "attention_width": attention.width,
        "attention_length": attention.length,
        "attention_backward": attention.backward,
        "launch_us": forward_s * 1e6,
        "launch_backward": over.backward,
        "launch_ends": over.ends_s / over.layer_s if over.layer_s else 0.0,
        "step_us": over.step_s * 1e6,
        "bucket_us": over.bucket_s * 1e6,
        "kernels": kernel_bytes(points.kernels, copied) | {"heads_bytes": 0.0},
    }
    errors = {"matmuls": matmuls.error, "attention": attention.error}
    if points.generation is not None:
        passes = points.generation
        row, weights, errors["matmuls of few tokens"] = fit_weights(passes.matmuls, matmuls)
        head_s, cached, errors["attention to the cache"] = fit_cached(passes.cached)
        figures["generation"] = {
            "layer_us": passes.layer_s * 1e6,
            "pass_us": passes.pass_s * 1e6,
            "request_us": passes.request_s * 1e6,
            "sequence_us": passes.sequence_s * 1e6,
            "head_us": head_s * 1e6,
            "cached_share": cached / matmuls.flops_per_s["fp32"],
            "prompt_us": passes.prompt_s * 1e6,
            "split_layer_us": passes.split_layer_s * 1e6,
            "split_pass_us": passes.split_pass_s * 1e6,
            "row_gb_per_s": row / 1e9,
            "weights_gb_per_s": weights / 1e9,
        }
    return figures, errors


def _peaks(
    machine: MachineMeasurements, fits: dict[int, tuple[dict[str, object], dict[str, float]]]
) -> dict[str, float]:
    """Return peak TFLOP/s: from the data sheet for accelerators known by name, so that MFU has its usual meaning;
    otherwise the best measured value."""
    best: dict[str, float] = {}
    for figures, _ in fits.values():
        reached = figures["tflops"]
        assert isinstance(reached, dict)
        best = {form: max(rate, best.get(form, 0.0)) for form, rate in reached.items()}
    words = set(re.findall(r"[a-z0-9]+", machine.name.lower()))
    for known in packaged_accelerators():
        if not machine.on_host and {known.name.partition("-")[0]} <= words:
            return {form: max(known.flops_per_s.get(form, 0.0) / 1e12, rate) for form, rate in best.items()}
    return best


def _inside(machine: MachineMeasurements) -> dict[str, object]:
    if not machine.inside:
        # One rank sends nothing; the format requires these values.
        return {"bus_gb_per_s": 1.0, "start_us": 0.0, "latency_us": 1.0, "half_mib": 0.0}
    link = fit_link(machine.inside)
    return {
        "bus_gb_per_s": link.bytes_per_s / 1e9,
        "start_us": link.start_s * 1e6,
        "latency_us": link.latency_s * 1e6,
        "half_mib": link.half_bytes / MiB,
        "relative": link.relative,
    }


def _pairs(**values: object) -> Iterator[str]:
    for key, value in values.items():
        yield f"{key} = {_written(value)}"


def _written(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float):
        text = f"{value:.5g}"
        return text if "." in text or "e" in text else f"{text}.0"
    if isinstance(value, list):
        return f"[{', '.join(map(_written, value))}]"
    if isinstance(value, dict):
        return f"{{ {', '.join(f'{key} = {_written(member)}' for key, member in value.items())} }}"
    return json.dumps(value)
