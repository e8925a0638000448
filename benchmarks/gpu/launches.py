"""Launches, waits and host time of steps of SmolLM2-1.7B at its true size on the mock, as a table in Markdown.

    VENV/bin/python benchmarks/gpu/launches.py MOCK [--only PATTERN ...]

MOCK is the folder that mock/build.py has filled. Each setting is run by the real `train` with one and with two
micro-batches a step. The counts are those of the third step. A row is printed as it is known.
"""

import argparse
import json
import sys
import tempfile
from fnmatch import fnmatch
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE / "mock"), str(HERE.parents[1] / "src")]

from memory import DEVICE_BYTES, Pair, settings  # noqa: E402
from run_file import toml  # noqa: E402
from steps import COMPILE, EXPERTS, FEW, LARGE, TENSORWISE, Settings  # noqa: E402

COLUMNS = (
    "settings",
    "launches of a step of one micro-batch",
    "of each further micro-batch",
    "waits of a step",
    "copies",
    "host s",
    "frames",
    "graph breaks",
)
CASES: dict[str, Settings] = {
    "eager": LARGE,
    "compiled": LARGE | COMPILE,
    "fp8": LARGE | TENSORWISE,
    "fp8 compiled": LARGE | COMPILE | TENSORWISE,
    "selective": LARGE | {"layout.recompute": "selective"},
    "selective compiled": LARGE | COMPILE | {"layout.recompute": "selective"},
    "offload compiled": LARGE | COMPILE | {"layout.offload_activations": "cpu"},
    "full compiled": LARGE | COMPILE | {"layout.recompute": "full"},
    "zero 3": LARGE | {"layout.zero": 3},
    "135m": FEW,
    "experts": EXPERTS,
    "experts compiled": EXPERTS | COMPILE,
}


def measure(name: str, keys: Settings, n_micro_batches: int, work: Path) -> dict[str, float]:
    """The counts of the last step of a run; raises `check.Problem` where it fails."""
    from check import run_ranks

    folder = work / f"{name.replace(' ', '-')}-{n_micro_batches}"
    folder.mkdir()
    batch = {"batch.global_batch": n_micro_batches * keys["batch.micro_batch"]}
    extensions = [str(HERE / "probe.py"), str(HERE / "mock/rank.py"), str(HERE / "mock/count.py")]
    (folder / "run.toml").write_text(toml(settings(Pair(name, keys | batch), work / "tokens", extensions)))
    more = {"MOCK_BYTES": str(DEVICE_BYTES), "MOCK_MAY_WAIT": "1", "MOCK_COUNTS": str(folder / "counts.json")}
    run_ranks(["train", "run.toml"], folder, 1, GPU_SAVES_NOTHING="1", **more)
    result: dict[str, float] = json.loads((folder / "counts.json").read_text())
    return result


def row(name: str, one: dict[str, float], two: dict[str, float]) -> list[str]:
    """The cells of a setting, from its counts with one and with two micro-batches a step."""
    numbers = [one["launches"], two["launches"] - one["launches"], one["waits"], one["copies"]]
    compiled = [one["frames"], one["graph_breaks"]]
    return [name, *(f"{n:,.0f}" for n in numbers), f"{one['host_s']:.3f}", *(f"{n:,.0f}" for n in compiled)]


def main() -> None:
    """Run the settings and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("mock", type=Path)
    parser.add_argument("--only", nargs="+", metavar="PATTERN", help="names of settings; * matches any text")
    options = parser.parse_args()
    from setting import start_on_mock

    start_on_mock(options.mock)
    from check import Problem, prepare_tokens

    print(f"| {' | '.join(COLUMNS)} |\n| --- |{' ---: |' * (len(COLUMNS) - 1)}", flush=True)
    failed = False
    with tempfile.TemporaryDirectory() as temporary:
        work = Path(temporary)
        prepare_tokens(work)
        for name, keys in CASES.items():
            if options.only and not any(fnmatch(name, pattern) for pattern in options.only):
                continue
            try:
                cells = row(name, *(measure(name, keys, n, work) for n in (1, 2)))
            except Problem as problem:
                failed, cells = True, [name, f"**{problem}**"]
            print(f"| {' | '.join(cells)} |", flush=True)
    sys.exit(failed)


if __name__ == "__main__":
    main()
