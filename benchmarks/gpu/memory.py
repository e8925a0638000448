"""Peaks of PyTorch's CUDA allocator at true size, next to the plan: pairs of model and setting on the mock.

    VENV/bin/python benchmarks/gpu/memory.py MOCK [--out FILE] [--only PATTERN ...] [--list]
    python benchmarks/gpu/memory.py --table FILE

MOCK is the folder that mock/build.py has filled. Each pair is three steps of the real `train` on as many mocked devices
as its layout has ranks. One line a pair is printed as it ends and added to FILE (memory.jsonl), which `--table` prints
as a table in Markdown with the plan of the code as it is now. Exit code 1 if a plan is further than 2 % from the peak
of allocated memory, or its allocator's share makes it further than 3 % from the peak of reserved memory.
"""

import argparse
import json
import shutil
import sys
import tempfile
from dataclasses import asdict, dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE / "mock"), str(HERE.parents[1] / "src")]

from plan import planned  # noqa: E402
from run_file import toml  # noqa: E402
from steps import BF16, CAPPED, COMPILE, EXPERTS, LARGE, LONG, TENSORWISE, Settings  # noqa: E402

STEPS = 3
DEVICE_BYTES = 192 * 2**30
"""More than any pair needs, so that the allocator never has to give memory back."""
ALLOCATED, RESERVED = 0.02, 0.03
"""How far the plan may be from the peaks."""
MEASURED = ("allocated_bytes", "reserved_bytes")
GiB = 2**30
LATENT = {"model.latent_attention": {"kv_rank": 512, "q_rank": 768, "nope_dim": 128, "rope_dim": 64, "v_dim": 128}} | {
    "model.n_kv_heads": 16,
    "model.qk_norm": False,
}


@dataclass(frozen=True)
class Pair:
    """A model and a setting, by the keys of a run file. `devices`: the ranks of its layout."""

    name: str
    settings: Settings
    devices: int = 1


def batch(seq_len: int, micro_batch: int, accumulation: int = 1, data_ranks: int = 1) -> Settings:
    """The keys of [batch]."""
    return {
        "batch.seq_len": seq_len,
        "batch.micro_batch": micro_batch,
        "batch.global_batch": micro_batch * accumulation * data_ranks,
    }


def layout(**keys: Any) -> Settings:
    """Keys of [layout]."""
    return {f"layout.{key}": value for key, value in keys.items()}


def model(preset: str, *more: Settings) -> Settings:
    """A model in bf16, and other settings."""
    result = BF16 | {"model.preset": preset}
    for each in more:
        result = result | each
    return result


def one_device() -> list[Pair]:
    """Every recomputation, offload and precision on one device, eager and compiled."""
    selective, full = layout(recompute="selective"), layout(recompute="full")
    offload = layout(offload_activations="cpu")
    settings: dict[str, Settings] = {
        "": {},
        "accumulate": {"batch.global_batch": 16},
        "selective": selective,
        "full": full,
        "offload": offload,
        "chunked loss": layout(loss_chunk_tokens=2048),
        "fp8": TENSORWISE,
    }
    pairs = {f"1.7b {name}": LARGE | each for name, each in settings.items()}
    pairs |= {f"1.7b {name} compile": LARGE | COMPILE | each for name, each in settings.items()}
    pairs |= {
        "1.7b fp8 selective compile": LARGE | COMPILE | TENSORWISE | selective,
        "1.7b fp8 rowwise compile": LARGE | COMPILE | {"precision.fp8": "rowwise"},
        "1.7b fp32": LARGE | {"precision.compute": "fp32", "batch.micro_batch": 2, "batch.global_batch": 2},
        "1b 32k": LONG,
        "1b 32k compile": LONG | COMPILE,
        "1b 32k chunked loss": LONG | layout(loss_chunk_tokens=2048),
        "1b 32k full compile": LONG | COMPILE | full,
        "experts": EXPERTS,
        "experts compile": EXPERTS | COMPILE,
        "experts full": EXPERTS | full,
        "experts selective compile": EXPERTS | COMPILE | selective,
        "qwen3-0.6b": model("qwen3-0.6b", batch(4096, 4)),
        "qwen3-0.6b compile": model("qwen3-0.6b", batch(4096, 4), COMPILE),
        "qwen3-0.6b selective compile": model("qwen3-0.6b", batch(4096, 4), COMPILE, selective),
        "gpt3-1.3b": model("gpt3-1.3b", batch(2048, 4)),
        "gpt3-1.3b compile": model("gpt3-1.3b", batch(2048, 4), COMPILE),
        "135m": model("smollm2-135m", batch(2048, 16)),
        "135m compile": model("smollm2-135m", batch(2048, 16), COMPILE),
        "135m offload optimizer": model("smollm2-135m", batch(2048, 16), layout(offload_optimizer="cpu")),
        "2.6b soft caps": CAPPED | full | layout(loss_chunk_tokens=4096),
        "1.7b zero 3": LARGE | layout(zero=3),
        "1.7b documents": LARGE | {"data.attention": "document"},
        "1.7b muon": LARGE | {"optimizer.name": "muon"},
        "1.7b adamw-8bit": LARGE | {"optimizer.name": "adamw-8bit"},
        "1.7b accumulate full": LARGE | full | {"batch.global_batch": 16},
        "1.7b five layers full": LARGE | full | layout(recompute_layers=5),
        "experts fp8 compile": EXPERTS | COMPILE | TENSORWISE,
        "latent attention": EXPERTS | LATENT,
        "latent attention compile": EXPERTS | LATENT | COMPILE,
    }
    return [Pair(name.replace("  ", " ").strip(), each) for name, each in pairs.items()]


def several_devices() -> list[Pair]:
    """Every axis on 2 to 8 devices."""
    large, small = model("llama-3.1-8b"), model("smollm2-1.7b")
    moe = model("qwen3-30b-a3b")
    rows: dict[str, tuple[int, Settings]] = {
        "1.7b dp 2 zero 1": (2, small | batch(4096, 4, 1, 2) | layout(dp_shard=2, zero=1)),
        "1.7b dp 2 zero 2 accumulate": (2, small | batch(4096, 2, 4, 2) | layout(dp_shard=2, zero=2)),
        "1.7b dp 4 zero 3": (4, small | batch(4096, 4, 1, 4) | layout(dp_shard=4, zero=3)),
        "1.7b dp 4 zero 3 compile": (4, small | COMPILE | batch(4096, 4, 1, 4) | layout(dp_shard=4, zero=3)),
        "1.7b tp 2": (2, small | batch(4096, 4) | layout(tp=2)),
        "1.7b tp 2 compile": (2, small | COMPILE | batch(4096, 4) | layout(tp=2)),
        "1.7b cp 2": (2, small | batch(8192, 2) | layout(cp=2)),
        "1.7b tp 2 accumulate": (2, small | batch(4096, 2, 4) | layout(tp=2)),
        "1.7b replicas 2": (2, small | batch(4096, 4, 1, 2) | layout(dp_replicate=2)),
        "1.7b fp32 replicas 2": (
            2,
            small | {"precision.compute": "fp32"} | batch(4096, 2, 1, 2) | layout(dp_replicate=2),
        ),
        "experts ep 2 compile": (2, EXPERTS | COMPILE | batch(2048, 4, 1, 2) | layout(dp_shard=2, ep=2, zero=2)),
        "1.7b pp 2 dp 2 tp 2 full": (
            8,
            small | batch(4096, 2, 8, 2) | layout(pp=2, dp_shard=2, tp=2, recompute="full"),
        ),
        "1.7b pp 2 zb-h1": (2, small | batch(4096, 2, 8) | layout(pp=2, pp_schedule="zb-h1")),
        "1.7b pp 2": (2, small | batch(4096, 2, 8) | layout(pp=2)),
        "8b dp 8 zero 3": (8, large | batch(8192, 1, 1, 8) | layout(dp_shard=8, zero=3)),
        "8b dp 8 zero 3 selective compile": (
            8,
            large | COMPILE | batch(8192, 1, 1, 8) | layout(dp_shard=8, zero=3, recompute="selective"),
        ),
        "8b dp 8 zero 3 full": (8, large | batch(8192, 2, 1, 8) | layout(dp_shard=8, zero=3, recompute="full")),
        "8b dp 4 tp 2": (8, large | batch(8192, 1, 1, 4) | layout(dp_shard=4, tp=2, zero=3)),
        "30b-a3b dp 8 ep 8": (8, moe | batch(2048, 2, 1, 8) | layout(dp_shard=8, ep=8, zero=3)),
    }
    return [Pair(name, settings, devices) for name, (devices, settings) in rows.items()]


PAIRS = [*one_device(), *several_devices()]


def measure(pair: Pair, folder: Path, tokens: Path) -> dict[str, int]:
    """The largest peaks of the pair's ranks; raises `check.Problem` where the run fails."""
    from check import run_ranks

    folder.mkdir()
    extensions = [str(HERE / "probe.py"), str(HERE / "mock/rank.py")]
    (folder / "run.toml").write_text(toml(settings(pair, tokens, extensions)))
    about = {"MOCK_DEVICES": str(pair.devices), "MOCK_BYTES": str(DEVICE_BYTES), "MOCK_MAY_WAIT": "1"}
    probe = {"GPU_PROBE": str(folder / "peaks-RANK.json"), "GPU_SAVES_NOTHING": "1"}
    run_ranks(["train", "run.toml"], folder, pair.devices, **about, **probe)
    peaks = [json.loads(path.read_text()) for path in folder.glob("peaks-*.json")]
    return {name: max(each[name] for each in peaks) for name in peaks[0]}


def settings(pair: Pair, tokens: Path, extensions: list[str]) -> Settings:
    """The keys of the run file of a pair."""
    return {
        "out": "run",
        "steps": STEPS,
        "device": "cuda",
        "extensions": extensions,
        "data.path": str(tokens),
        "evaluation.samples": 0,
        **pair.settings,
    }


def compared(pair: Pair, peaks: dict[str, int]) -> dict[str, Any]:
    """A record of the peaks of a pair, with the plan."""
    with tempfile.TemporaryDirectory() as folder:
        return asdict(pair) | peaks | planned(settings(pair, Path("tokens"), []), Path(folder) / "run.toml", "h100")


def is_near(record: dict[str, Any]) -> bool:
    """Whether the plan of a record is as near to the peaks as it has to be."""
    return abs(error(record, "allocated")) <= ALLOCATED and abs(error(record, "reserved")) <= RESERVED


def error(record: dict[str, Any], what: str) -> float:
    """The plan over the peak, less 1."""
    return float(record[f"planned_{what}_bytes"] / record[f"{what}_bytes"] - 1)


def line(record: dict[str, Any]) -> str:
    """A record as a row of a table in Markdown."""
    sizes = [
        f"{record[f'{who}{what}_bytes'] / GiB:.2f}" for what in ("allocated", "reserved") for who in ("", "planned_")
    ]
    errors = [f"{100 * error(record, what):+.1f} %" for what in ("allocated", "reserved")]
    cells = [record["name"], str(record["devices"]), *sizes[:2], errors[0], *sizes[2:], errors[1]]
    return f"| {' | '.join(cells)} |" + ("" if is_near(record) else " <--")


HEAD = """| pair | devices | allocated, GiB | planned | error | reserved, GiB | planned | error |
| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |"""


def table(path: Path) -> bool:
    """Print the records of a file, the last of each pair, with the plan as it is now; whether all are near."""
    records = {record["name"]: record for record in map(json.loads, path.read_text().splitlines())}
    print(HEAD)
    now = []
    for record in records.values():
        pair = Pair(record["name"], record["settings"], record["devices"])
        now.append(compared(pair, {name: record[name] for name in MEASURED}))
        print(line(now[-1]))
    return all(map(is_near, now))


def run_pairs(options: argparse.Namespace, pairs: list[Pair]) -> bool:
    """Measure pairs, one after another; whether the plans of all are near."""
    from check import Problem, prepare_tokens

    near = True
    work = Path(tempfile.mkdtemp())
    try:
        tokens = prepare_tokens(work)
        print(HEAD)
        for number, pair in enumerate(pairs):
            try:
                peaks = measure(pair, work / str(number), tokens)
            except Problem as problem:
                print(f"{pair.name}: {problem}", flush=True)
                near = False
                continue
            with options.out.open("a") as file:
                file.write(json.dumps(asdict(pair) | {name: peaks[name] for name in MEASURED}) + "\n")
            record = compared(pair, peaks)
            print(line(record), flush=True)
            near = near and is_near(record)
            shutil.rmtree(work / str(number))
    finally:
        shutil.rmtree(work)
    return near


def main() -> None:
    """Measure the pairs, or print the table of a file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("mock", type=Path, nargs="?", help="the folder of mock/build.py")
    parser.add_argument("--out", type=Path, default=Path("memory.jsonl"), metavar="FILE")
    parser.add_argument("--only", nargs="+", metavar="PATTERN", help="names of pairs; * matches any text")
    parser.add_argument("--list", action="store_true", help="print the names and end")
    parser.add_argument("--table", type=Path, metavar="FILE", help="print the peaks in FILE next to the plan")
    options = parser.parse_args()
    if options.table:
        sys.exit(not table(options.table))
    pairs = [each for each in PAIRS if not options.only or any(fnmatch(each.name, name) for name in options.only)]
    if options.list or not pairs:
        print("\n".join(each.name for each in pairs or PAIRS))
        sys.exit(0 if options.list else f"no pair is named {' or '.join(options.only)}")
    if options.mock is None:
        parser.error("MOCK is missing: the folder that benchmarks/gpu/mock/build.py has filled")
    from setting import start_on_mock

    start_on_mock(options.mock)
    sys.exit(not run_pairs(options, pairs))


if __name__ == "__main__":
    main()
