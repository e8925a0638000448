"""The first half hour on a GPU: three parts of at most ten minutes each, the results written as they come.

    python benchmarks/gpu/plan.py 1|2|3 [--out FOLDER] [--only NAME ...] [--together N] [--mock FOLDER]

Every step runs in processes of its own, under its own time limit, and a step that fails does not stop the others.
FOLDER (by default that of the variable OUT, else gpu-results) gets part-N.jsonl, one line a step, and part-N.log, the
ends of the outputs of steps that failed. `page.py` makes the page of them. README.md says how to carry it to a machine.
"""

import argparse
import importlib.util
import itertools
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import date
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
sys.path[:0] = [str(HERE), str(ROOT / "src")]

from run_file import python_path, toml  # noqa: E402
from steps import PARTS, TOGETHER, Settings, Step  # noqa: E402

PART_S = 570.0
ON_MOCK = 10.0
"""Limits on the mock over those on a GPU: its machine has few cores, and shares them."""
SHOWN_LINES = 25
PREPARE = ("-m", "shardwright", "data", "prepare", "WORK/text", "--out", "TOKENS", "--vocab-size", "500")
VERSIONS = (
    "import json, torch; p = torch.cuda.get_device_properties(0); print(json.dumps({'device': p.name, "
    "'device_bytes': p.total_memory, 'torch': torch.__version__, 'nccl': torch.cuda.nccl.version()}))"
)


class Part:
    """One part of the plan: its folders, its variables and the time that it has left."""

    def __init__(self, number: int, out: Path, mock: Path | None) -> None:
        self.number, self.out, self.mock = number, out.resolve(), mock
        self.out.mkdir(parents=True, exist_ok=True)
        self.work = Path(tempfile.gettempdir()) / "shardwright-gpu"
        self.work.mkdir(exist_ok=True)
        self.results, self.log = self.out / f"part-{number}.jsonl", self.out / f"part-{number}.log"
        self.accelerator = "h100"
        self.slower = 1.0 if mock is None else ON_MOCK
        self.until_s = time.monotonic() + self.slower * PART_S
        self.environment = {
            **os.environ,
            "PYTHONPATH": python_path(),
            "PYTHONUNBUFFERED": "1",
            "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "8"),
        }
        if mock is not None:
            sys.path.insert(0, str(HERE / "mock"))
            from setting import environment

            self.environment |= environment(mock.resolve()) | {"MOCK_MAY_WAIT": "1"}

    @property
    def tokens(self) -> Path:
        """The data that every run reads."""
        return self.work / "tokens"

    def write(self, record: dict[str, Any]) -> None:
        """Add a line to the results, and print it."""
        line = json.dumps(record)
        with self.results.open("a") as file:
            file.write(line + "\n")
        print(line, flush=True)

    def placed(self, text: str) -> str:
        """A word of a command with its folders."""
        for name, folder in (("OUT", self.out), ("WORK", self.work), ("TOKENS", self.tokens)):
            text = text.replace(name, str(folder))
        return text

    def python(self, words: tuple[str, ...], limit_s: float, **more: str) -> tuple[int | str, str]:
        """Run Python in a session of its own; its exit code, or why there is none, and its output."""
        limit_s = min(self.slower * limit_s, self.until_s - time.monotonic())
        if limit_s < 1:
            return "no time left", ""
        process = subprocess.Popen(
            [sys.executable, *map(self.placed, words)],
            env=self.environment | {name: self.placed(value) for name, value in more.items()},
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        try:
            output, _ = process.communicate(timeout=limit_s)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            return f"ended after {limit_s:.0f} s", process.communicate()[0]
        return process.returncode, output

    def run(self, step: Step) -> None:
        """Run a step and write its line."""
        if missing := [name for name in step.needs if importlib.util.find_spec(name) is None]:
            return self.write({"step": step.name, "skipped": f"needs {', '.join(missing)}"})
        if step.kernels and self.mock is not None:
            return self.write({"step": step.name, "skipped": "the mock has neither kernels nor CUDA graphs"})
        began_s = time.monotonic()
        more = dict(step.environment)
        words = step.command
        if step.settings is not None:
            run_file, probe = self.work / f"{step.name}.toml", self.work / f"{step.name}.json"
            every = self.settings(step, step.settings)
            run_file.write_text(toml(every))
            probe.unlink(missing_ok=True)
            more |= {"GPU_PROBE": str(probe)} | ({} if step.saves else {"GPU_SAVES_NOTHING": "1"})
            words = ("-m", "shardwright", "train", str(run_file))
        code, output = self.python(words, step.limit_s, **more)
        record: dict[str, Any] = {"step": step.name, "exit": code, "s": round(time.monotonic() - began_s, 1)}
        if step.settings is not None:
            record |= measured(self.work / step.name, probe)
            record |= planned(every, self.work / f"{step.name}-plan.toml", self.accelerator)
            if code == 0 and record.get("steps", 0) < step.n_steps:
                code = record["exit"] = f"{record.get('steps', 0)} of {step.n_steps} steps are in metrics.jsonl"
        elif code == 0 and output.rstrip().endswith("}"):
            record |= last_document(output)
        if code != 0:
            with self.log.open("a") as file:
                file.write(f"--- {step.name}: {code}\n" + "\n".join(output.splitlines()[-SHOWN_LINES:]) + "\n")
            print("\n".join(line[:300] for line in output.splitlines()[-SHOWN_LINES:]), flush=True)
        self.write(record)

    def settings(self, step: Step, settings: Settings) -> Settings:
        """The settings of a step's run file."""
        return {
            "out": str(self.fresh(step.name)),
            "steps": step.n_steps,
            "device": "cuda",
            "extensions": [str(HERE / "probe.py"), *([] if self.mock is None else [str(HERE / "mock/rank.py")])],
            "data.path": str(self.tokens),
            "metrics.every": 1,
            "evaluation.samples": 0,
            **settings,
            **({} if self.mock is None else step.on_mock),
        }

    def fresh(self, name: str) -> Path:
        """The folder of a run; what an earlier try left there is renamed."""
        folder = self.work / name
        if folder.exists():
            folder.rename(folder.with_name(f"{name}-before-{time.time_ns()}"))
        return folder


def measured(run: Path, probe: Path) -> dict[str, Any]:
    """Medians over the second half of the steps of a run, and the peaks of the allocator."""
    try:
        lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    except (OSError, ValueError):
        return {}
    steps = [line for line in lines if "loss" in line and "tokens_per_s" in line]
    if not steps:
        return {}
    late = steps[len(steps) // 2 :]
    result: dict[str, Any] = {"steps": len(steps), "loss": [steps[0]["loss"], steps[-1]["loss"]]}
    for name in ("tokens_per_s", "mfu"):
        values = [step[name] for step in late if step.get(name) is not None]
        result[name] = statistics.median(values) if values else None
    return result | (json.loads(probe.read_text()) if probe.exists() else {})


def planned(settings: Settings, run_file: Path, accelerator: str) -> dict[str, Any]:
    """The plan of a run for one accelerator: tokens per second, and the most bytes allocated and reserved. It reads a
    run file without the extensions, which it would not import: they change what is measured, not the run."""
    from shardwright.config import load
    from shardwright.config.settle import job_of
    from shardwright.cost.step import estimate
    from shardwright.system.errors import ShardwrightError

    run_file.write_text(toml({key: value for key, value in settings.items() if key != "extensions"}))
    try:
        config = load(run_file)
        result = estimate(job_of(config, accelerator), config.layout.layout(), config.batch.micro_batch)
        return {
            "planned_tokens_per_s": config.batch.global_batch * config.batch.seq_len / result.step_s,
            "planned_allocated_bytes": float(result.memory.peak_bytes[0]),
            "planned_reserved_bytes": result.peak_bytes,
        }
    except ShardwrightError as error:
        return {"planned": str(error)}


def accelerator_of(name: str) -> str:
    """What `plan` calls the device of this name; an H100 where it is not known."""
    from shardwright.training.device import accelerator_of_name

    found = accelerator_of_name(name)
    return "h100" if found is None else found.name


def last_document(output: str) -> dict[str, Any]:
    """The JSON object on the last line of an output, if that is one."""
    try:
        result = json.loads(output.splitlines()[-1])
    except ValueError:
        return {}
    return result if isinstance(result, dict) else {}


def prepare(part: Part) -> None:
    """Write which machine this is, and make the data from the standard library, unless an earlier part has."""
    code, output = part.python(("-c", VERSIONS), 60)
    machine = last_document(output) if code == 0 else {"output": output[-500:]}
    part.accelerator = accelerator_of(machine.get("device", ""))
    about = {"date": str(date.today()), "mock": part.mock is not None, "planned_for": part.accelerator}
    part.write({"part": part.number, "exit": code} | about | machine)
    if part.tokens.exists():
        return
    text = part.work / "text"
    text.mkdir(exist_ok=True)
    for source in sorted(Path(os.__file__).parent.glob("*.py")):
        (text / source.name).write_bytes(source.read_bytes())
    code, output = part.python(PREPARE, 60)
    if code != 0:
        sys.exit(f"the data cannot be prepared: {output[-2000:]}")


def main() -> None:
    """Run the steps of a part."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", type=int, choices=PARTS)
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT", "gpu-results")))
    parser.add_argument("--only", nargs="+", metavar="NAME", help="the steps to run, by name")
    parser.add_argument("--together", type=int, metavar="N", help="steps at a time; of part 1 on a GPU six")
    parser.add_argument("--mock", type=Path, metavar="FOLDER", help="rehearse on the mock that mock/build.py has made")
    options = parser.parse_args()
    part = Part(options.part, options.out, options.mock)
    prepare(part)
    steps = [step for step in PARTS[options.part]() if not options.only or step.name in options.only]
    together = options.together or (TOGETHER if options.part == 1 and options.mock is None else 1)
    for _, some in itertools.groupby(steps, lambda step: step.after):
        with ThreadPoolExecutor(together) as threads:
            list(threads.map(part.run, some))


if __name__ == "__main__":
    main()
