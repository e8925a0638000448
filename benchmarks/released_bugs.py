"""Find silent bugs of released systems again: each release in an environment of its own, and `verify --trainer` on it.

    python benchmarks/released_bugs.py                 list the cases
    python benchmarks/released_bugs.py NAME [NAME..]   run cases, or all

An environment is made in --folder from the packages of the case, above those of the interpreter that runs this script,
which has Shardwright and PyTorch. Cases with the same packages share one. The exit status is 1 if a case does not end
as listed.
"""

import argparse
import os
import re
import subprocess
import sys
import tempfile
import time
import venv
from dataclasses import dataclass
from pathlib import Path

REFERENCES = Path(__file__).parent / "references"
"""One process: the loop and the loss are plain PyTorch; for transformers the model is the library's. The reference of
Megatron Core, of ZeRO and of DeepSpeed's experts is the library in one process, on one micro-batch."""


@dataclass(frozen=True)
class Case:
    """A release, the arguments of `verify` that follow --trainer, and a part of the sentence that names the bug."""

    packages: str
    arguments: str
    culprit: str = ""
    """Empty for a release without the bug, which has to be equal."""


_OLD = "accelerate==1.0.1 tokenizers==0.20.3 huggingface_hub==0.25.2 datasets==3.0.1 psutil"
_NOW = "transformers==5.24.0 accelerate==1.15.0"
_TWO = "transformers --world 2 --steps 1"
_OLD_SPEED = "--no-build-isolation"  # the build of these releases imports torch
_SPEED = "deepspeed --world 2 --steps 1 --set"
_EXPERTS = f"{_SPEED} ep=2 --set experts=4"
_ONE = "deepspeed --world 1 --steps 1 --set batch.global_batch=2"
_OWN_LOSS = f"{_TWO} --set own_loss=true"
_TP = f"{Path(__file__).parents[1]}/examples/trainers/transformers_tp.py --world 2 --steps 1 --dtype float32"
_PIPELINE = "deepspeed --world 2 --steps 1 --set pp=2 --dtype float32"
_CLIPPED_PIPELINE = "deepspeed --world 2 --steps 2 --set pp=2 --dtype float32"
_TITAN = "torchtitan --world 2 --steps 1 --set dp_shard=2 --set batch.seq_len=256 --set model.max_seq_len=256"
_CORE = "megatron-core==0.16.1 einops"
_MEGATRON = "megatron --world 2 --steps 1 --set"
_RAGGED = "it is equal without dp=2 and without ragged masks"
CASES = {
    "transformers-4.45.2": Case(
        f"transformers==4.45.2 {_OLD}", _TWO, "it is equal without accumulation and without ragged masks"
    ),
    "transformers-4.46.0": Case('transformers==4.46.0 "accelerate<1.11" "datasets<4" psutil', _TWO, _RAGGED),
    "transformers-4.47.1": Case('transformers==4.47.1 "accelerate<1.11" "datasets<4" psutil', _TWO, _RAGGED),
    "transformers-4.57.1": Case('transformers==4.57.1 "accelerate<1.11" "datasets<4" psutil', _TWO),
    "transformers-5.23.0": Case("transformers==5.23.0 accelerate==1.15.0", _TWO),
    "transformers-4.47.0-own-loss": Case(
        'transformers==4.47.0 "accelerate<1.11" "datasets<4" psutil', _OWN_LOSS, "it is equal without accumulation"
    ),
    "transformers-5.24.0-own-loss": Case(_NOW, _OWN_LOSS),
    "transformers-5.24.0-tp": Case(_NOW, f"{_TP} --set batch.global_batch=2"),
    "transformers-5.24.0-tp-accumulation": Case(_NOW, _TP, "without tp=2 and without accumulation"),
    "deepspeed-0.19.2-pipeline": Case("deepspeed==0.19.2", _PIPELINE, "without pp=2 and without accumulation"),
    "deepspeed-0.19.8-pipeline": Case("deepspeed==0.19.8", _PIPELINE),
    "deepspeed-0.17.6-zero": Case("deepspeed==0.17.6", f"{_SPEED} zero=2", "without zero=2 and without accumulation"),
    "deepspeed-0.19.8-zero": Case("deepspeed==0.19.8", f"{_SPEED} zero=2"),
    "deepspeed-0.17.6-scale": Case(
        "deepspeed==0.17.6", _ONE, "one rank (1 rank): parameter of head.weight in step 1 (unclipped)"
    ),
    "deepspeed-0.19.8-scale": Case("deepspeed==0.19.8", _ONE),
    "deepspeed-0.15.2-experts": Case(
        f"deepspeed==0.15.2 {_OLD_SPEED}", f"{_EXPERTS} --set zero=1", "it is equal without ep=2 and without zero=1"
    ),
    "deepspeed-0.15.4-experts": Case(f"deepspeed==0.15.4 {_OLD_SPEED}", f"{_EXPERTS} --set zero=1"),
    "deepspeed-0.19.8-expert-norm": Case("deepspeed==0.19.8", _EXPERTS, "without ep=2 and without clipping"),
    "deepspeed-0.19.8-pipeline-norm": Case(
        "deepspeed==0.19.8", _CLIPPED_PIPELINE, "without pp=2 and without clipping and without several steps"
    ),
    "deepspeed-0.19.8-pipeline-zero": Case("deepspeed==0.19.8", f"{_CLIPPED_PIPELINE} --set zero=1"),
    "torchtitan-0.3.0-logged-loss": Case(
        "torchtitan==0.3.0 triton", f"{_TITAN} --set spmd_backend=full_dtensor", "it is equal without dp_shard=2"
    ),
    "torchtitan-0.3.0": Case("torchtitan==0.3.0 triton", _TITAN),
    "megatron-0.16.1-expert-tp": Case(
        _CORE,
        f"{_MEGATRON} tp=2 --set experts=4 --set sequence_parallel=true --set expert_tp=1",
        "it is equal without experts=4 and without expert_tp=1",
    ),
    "megatron-0.16.1-sinks": Case(_CORE, f"{_MEGATRON} tp=2 --set sinks=true", "without tp=2 and without sinks=True"),
    "megatron-0.16.1-interleaved": Case(
        _CORE,
        f"{_MEGATRON} pp=2 --set virtual_stages=2 --set model.n_layers=4 --set overlap_p2p=false",
        "without pp=2 and without virtual_stages=2 and without overlap_p2p=False",
    ),
    "megatron-0.16.1-balance": Case(
        _CORE,
        f"{_MEGATRON} tp=2 --set sequence_parallel=true --set experts=4 --set aux_loss=0.1 --set batch.global_batch=2 "
        f"--set batch.micro_batch=2",
        "it is equal without tp=2 and without aux_loss=0.1",
    ),
    "megatron-0.16.1-experts": Case(
        _CORE, f"{_MEGATRON} tp=2 --set ep=2 --set experts=4 --set sequence_parallel=true --world 4"
    ),
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", choices=[*CASES, "all", []], metavar="NAME")
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()) / "released-bugs")
    given = parser.parse_args()
    if not given.names:
        for name, case in CASES.items():
            print(f"{name:35} {case.culprit or 'equal'}")
    names = list(CASES) if "all" in given.names else given.names
    return max([_run(name, CASES[name], given.folder) for name in names], default=0)


def _run(name: str, case: Case, folder: Path) -> int:
    """Verify a release. Returns 1 if the result is not the listed one."""
    python = _environment(case, folder / re.sub(r"[^\w.]+", "-", case.packages))
    own = "zero=" in case.arguments or "experts=" in case.arguments  # the reference is the library in one process
    file = {"transformers": "llama.py", "deepspeed": "decoder.py"}.get(case.arguments.partition(" ")[0])
    reference = ["--reference", REFERENCES / file] if file and not own else []
    began_s = time.monotonic()
    result = subprocess.run(
        [python, "-m", "shardwright", "verify", "--trainer", *case.arguments.split(), *reference],
        env=os.environ | {"DS_ACCELERATOR": "cpu"},
        capture_output=True,
        text=True,
        check=False,
    )
    text = " ".join(result.stdout.split())
    as_listed = result.returncode == (1 if case.culprit else 0) and case.culprit in text
    lines = [line for line in result.stdout.splitlines() if line.startswith(("equal", "not equal", "culprit"))]
    print(f"{name}: {'as listed' if as_listed else 'NOT AS LISTED'} ({time.monotonic() - began_s:.0f} s)")
    print("\n".join(lines if as_listed else [result.stdout, result.stderr]), flush=True)
    return int(not as_listed)


def _environment(case: Case, folder: Path) -> Path:
    """Return the interpreter of an environment with the packages of a case, which is made if it is not there."""
    python, made = folder / "bin" / "python", folder / ".made"
    if not made.exists():
        venv.create(folder, with_pip=True, clear=True)
        [packages] = (folder / "lib").glob("python*/site-packages")
        below = [path for path in sys.path if path.endswith("site-packages")]
        source = Path(__file__).parents[1] / "src"
        # The source first: a folder below can name that of another checkout.
        lines = [str(source), *(f"import site; site.addsitedir({path!r})" for path in below)]
        (packages / "zz-below.pth").write_text("\n".join(lines) + "\n")
        pip = [python, "-m", "pip", "install", "--quiet"]
        if "--no-build-isolation" in case.packages:
            subprocess.run([*pip, "wheel"], check=True)  # setuptools of this Python builds nothing without it
        install = [*pip, *(word.strip('"') for word in case.packages.split())]
        subprocess.run(install, env=os.environ | {"DS_BUILD_OPS": "0"}, check=True)
        made.touch()
    return python


if __name__ == "__main__":
    sys.exit(main())
