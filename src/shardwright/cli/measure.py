"""shardwright measure: the rates of this machine, for plan."""

import os
import shlex
import sys
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardwright.cli.common import (
    AsJson,
    device_problems,
    error_console,
    flag,
    option,
    output_problems,
    print_text,
    show,
    size_problems,
    verb,
)
from shardwright.system.errors import InputError

if TYPE_CHECKING:
    from shardwright.measuring.points import MachineMeasurements

CLOCKS = ("wall", "cpu")


@dataclass(frozen=True)
class MeasureOptions:
    """Options of `measure`."""

    out: Path | None = option(None, "the hardware file to write, for plan --hardware", "FILE.toml")
    html: Path | None = option(None, "write one page with the curves", "FILE.html")
    device: str = option("auto", "auto, cpu or cuda")
    ranks: int | None = option(None, "on a CPU, measure 1 and N local ranks; as many as cores if not given", "N")
    clock: str = option(
        "wall", "wall, or on a CPU that other programs load, cpu: CPU-seconds, without the time that ranks wait", "NAME"
    )
    budget: float = option(0.05, "for the repeats of each operation", "SECONDS")
    overwrite: bool = flag("replace a file that exists")
    json: AsJson = False


@verb
def measure(options: MeasureOptions) -> None:
    """Measure this machine, so that plan knows its rates.

    Measured are matmuls by shape and precision, attention by length, element-wise operations, copies, launches,
    collectives and sends by size, and the links to the host and to a disk.

    A CPU is an accelerator like any other, whose ranks share its cores: it is measured with one rank, and with as many
    as it has cores. The links between GPUs, and those between nodes, are measured under torchrun, which gives each
    process its rank.

    shardwright measure --out mine.toml

    shardwright plan run.toml --hardware mine.toml --cluster mine:2

    torchrun --nnodes 2 --nproc-per-node 8 --rdzv-backend c10d --rdzv-endpoint HOST:PORT -m shardwright \\
    measure --out mine.toml

    Exit codes: 0 measured, 2 the input cannot be used, 3 a rank failed.
    """
    problems = _problems(options)
    if find_spec("torch") is None:
        problems.append("measure runs PyTorch, which is not installed here: pip install torch")
    if problems:
        raise InputError(*problems)
    from shardwright.verification.ranks import start_server

    start_server()  # it imports PyTorch while this process does
    machine = _measured(options)
    if machine is not None:
        _write(machine, options)


def _problems(options: MeasureOptions) -> list[str]:
    problems = device_problems(options.device) + output_problems("--html", options.html, ".html")
    problems += output_problems("--out", options.out, ".toml")
    if options.out is None and options.html is None and not options.json:
        problems.append("--out is missing; name the hardware file to write, such as --out mine.toml")
    if options.out is not None and options.out.is_file() and not options.overwrite:
        problems.append(f"--out {options.out}: the file exists; name another, or add --overwrite to replace it")
    if options.clock not in CLOCKS:
        problems.append(f"--clock {options.clock}: not one of {', '.join(CLOCKS)}")
    if not 0 < options.budget < 60:
        problems.append(f"--budget {options.budget:g}: seconds above 0 and below 60 are needed, such as 0.05")
    problems += size_problems({"--ranks": options.ranks})
    if "RANK" in os.environ and options.ranks is not None:
        problems.append(f"--ranks {options.ranks}: torchrun has started the ranks; leave it out")
    return problems


def _measured(options: MeasureOptions) -> "MachineMeasurements | None":
    """Return the measurements, or None on any rank except the first."""
    from shardwright.measuring.machine import measure_as_rank, measure_here
    from shardwright.training.ranks import ProcessRank, pick_device, place_from_environment, process_group

    place = place_from_environment()
    device = pick_device(options.device, place or ProcessRank())
    if options.clock == "cpu" and device.type == "cuda":
        raise InputError("--clock cpu: CPU-seconds say nothing of a GPU; leave it out")
    folder = (options.out or options.html or Path("x")).absolute().parent
    kind: Any = options.clock
    if place is None:
        most = options.ranks or os.cpu_count() or 1
        tell = error_console.print
        return measure_here(kind, device.type, (1, most), folder, options.budget, tell)
    ranks_here = int(os.environ.get("LOCAL_WORLD_SIZE", place.world_size))
    with process_group(place, device):
        return measure_as_rank(kind, device, ranks_here, folder, options.budget)


def _write(machine: "MachineMeasurements", options: MeasureOptions) -> None:
    from shardwright.cost.hardware_file import name_of_file
    from shardwright.measuring.file import hardware_toml
    from shardwright.measuring.view import machine_document
    from shardwright.system.files import write_whole

    written = []
    if options.out is not None:
        name = name_of_file(options.out)
        command = shlex.join(["shardwright", *sys.argv[1:]])
        write_whole(options.out, hardware_toml(machine, name, command).encode())
        written.append(options.out)
    show(machine_document(machine), options.json, options.html, *written)
    if options.out is not None and not options.json:
        print_text(f"  shardwright plan RUN.toml --hardware {options.out} --cluster {name}:{machine.ranks[-1].ranks}")
