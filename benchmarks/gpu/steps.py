"""The steps of the GPU plan, as data: three parts of at most ten minutes each."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

Settings = dict[str, Any]


@dataclass(frozen=True)
class Step:
    """A step of a part, which is ended after `limit_s`.

    A step with `settings` is a run of `train` with these keys, of `n_steps` steps. Otherwise `command` is what Python
    runs; in it OUT is the folder of results, WORK one for runs, TOKENS the data. `needs`: modules without which the
    step is skipped. `kernels`: whether it is skipped on the mock, which has neither kernels nor CUDA graphs. `after`:
    whether it begins when the steps before it have ended, also where some run together. `saves`: whether the run ends
    with a checkpoint, of 12 bytes a parameter. `on_mock`: keys with other values on the mock, where memory of the host
    is used as on a GPU.
    """

    name: str
    limit_s: float
    settings: Settings | None = None
    n_steps: int = 6
    command: tuple[str, ...] = ()
    needs: tuple[str, ...] = ()
    kernels: bool = False
    after: bool = False
    saves: bool = False
    environment: dict[str, str] = field(default_factory=dict)
    on_mock: Settings = field(default_factory=dict)


BF16 = {"precision.compute": "bf16"}
COMPILE = {"precision.compile": True}
GRAPHS = COMPILE | {"precision.cuda_graphs": True}
TENSORWISE = {"precision.fp8": "tensorwise"}
SMALL = {"model.preset": "debug", "batch.seq_len": 256, "batch.global_batch": 8, "batch.micro_batch": 2}
WINDOWS = {"model.window": 64, "model.global_interval": 2}
LINEAR = {
    "model.linear_attention.n_k_heads": 2,
    "model.linear_attention.n_v_heads": 4,
    "model.linear_attention.k_dim": 16,
    "model.linear_attention.v_dim": 16,
    "model.linear_attention.full_interval": 2,
}
SMALL_EXPERTS = SMALL | BF16 | {"model.preset": "debug-moe"}
LARGE = BF16 | {"model.preset": "smollm2-1.7b", "batch.seq_len": 4096, "batch.global_batch": 4, "batch.micro_batch": 4}
FEW = LARGE | {"model.preset": "smollm2-135m", "batch.seq_len": 1024}
"""So little work for each launch that a GPU waits for the host."""
LONG = BF16 | {"model.preset": "llama-3.2-1b", "batch.seq_len": 32768, "batch.global_batch": 1, "batch.micro_batch": 1}
CAPPED = BF16 | {"model.preset": "gemma2-2b", "batch.seq_len": 8192, "batch.global_batch": 1, "batch.micro_batch": 1}
EXPERTS = BF16 | {
    "model.preset": "qwen3-0.6b",
    "model.moe.n_experts": 16,
    "model.moe.top_k": 2,
    "model.moe.d_ffn": 1536,
    "batch.seq_len": 2048,
    "batch.global_batch": 4,
    "batch.micro_batch": 4,
}
"""A mixture of 2.4B parameters, of which a token uses 0.7B."""

SHARDWRIGHT = ("-m", "shardwright")
HERE = "benchmarks/gpu"
ROOT = Path(__file__).parents[2]
TOGETHER = 6
"""Steps of part 1 that run at a time: they are small, and nobody reads their times."""


def smoke() -> list[Step]:
    """Every feature of CUDA once, on a model of 0.3M parameters."""
    on_host = {"layout.offload_activations": "cpu", "layout.offload_min_bytes": 1024}
    settings: dict[str, Settings] = {
        "bf16": BF16,
        "fp32": {},
        "tf32": {"precision.tf32": True},
        "fp16": {"precision.compute": "fp16"},
        "compile": BF16 | COMPILE,
        "fp8": BF16 | TENSORWISE,
        "fp8-rowwise": BF16 | {"precision.fp8": "rowwise"},
        "recompute-full": BF16 | {"layout.recompute": "full"},
        "recompute-selective": BF16 | {"layout.recompute": "selective", "layout.loss_chunk_tokens": 128},
        "documents": BF16 | {"data.attention": "document"},
        "muon": BF16 | {"optimizer.name": "muon"},
        "adamw-8bit": BF16 | {"optimizer.name": "adamw-8bit"},
        "offload-optimizer": BF16 | {"layout.offload_optimizer": "cpu"},
        "offload-activations": BF16 | on_host,
        "async-checkpoints": BF16 | {"checkpoint.every": 2, "checkpoint.async_mode": "async"},
        "spikes": BF16 | {"faults.spike": "skip"},
        "windows": BF16 | WINDOWS,
        "linear-attention": BF16 | LINEAR,
        "average": BF16 | {"average.kind": "ema", "average.device": "cpu"},
    }
    runs = [Step(name, 90, SMALL | each, saves=True) for name, each in settings.items()]
    runs += [
        Step("experts", 90, SMALL_EXPERTS, saves=True),
        Step("experts-compile", 120, SMALL_EXPERTS | COMPILE, saves=True),
        Step("cuda-graphs", 120, SMALL | BF16 | GRAPHS, saves=True, kernels=True),
        Step("experts-cuda-graphs", 120, SMALL_EXPERTS | GRAPHS, saves=True, kernels=True),
        Step("soft-caps", 120, SMALL | BF16 | WINDOWS | {"model.attention_softcap": 50.0}, saves=True),
    ]
    generate = (
        *SHARDWRIGHT,
        "generate",
        "WORK/bf16",
        "--prompt",
        "import os",
        "--max-tokens",
        "32",
        "--device",
        "cuda",
    )
    keys = ("init.weights='WORK/bf16'", "lora.rank=8", "lora.base='nf4'", "lora.dropout=0.1", "out='WORK/adapters-nf4'")
    adapters = (*SHARDWRIGHT, "train", "WORK/bf16.toml", *(word for key in keys for word in ("--set", key)))
    score = (*SHARDWRIGHT, "eval", "WORK/bf16", "--data", "TOKENS", "--device", "cuda")
    tests = ("-m", "pytest", "-q", "--tb=short", "-m", "gpu", "-p", "no:cacheprovider", *files_of_gpu_tests())
    return [
        Step("tests", 180, command=tests, needs=("pytest", "hypothesis"), kernels=True),
        *runs,
        Step("generate", 60, command=generate, after=True),
        Step("generate-batch-invariant", 60, command=(*generate, "--batch-invariant"), after=True),
        Step("adapters-nf4", 90, command=adapters, after=True),
        Step("eval", 60, command=score, after=True),
    ]


def files_of_gpu_tests() -> list[str]:
    """The test files that have tests marked `gpu`: to collect all others takes longer than to run these."""
    files = sorted((ROOT / "tests").rglob("test_*.py"))
    return [str(path.relative_to(ROOT)) for path in files if "mark.gpu" in path.read_text()]


def speed() -> list[Step]:
    """SmolLM2-1.7B with sequences of 4,096 tokens, and the same model in a loop written by hand."""
    loop = (f"{HERE}/torch_loop.py",)
    eager, compiled, fp8 = ({"GPU_PROFILE": f"OUT/profile-{name}.txt"} for name in ("eager", "compile", "fp8"))
    compiled["GPU_TRACE"] = "OUT/trace-compile.json.gz"
    return [
        Step("1.7b-eager", 80, LARGE, 14),
        Step("1.7b-compile", 110, LARGE | COMPILE, 14),
        Step("torch-compile", 90, command=(*loop, "--compile")),
        Step("1.7b-compile-fp8", 110, LARGE | COMPILE | TENSORWISE, 14),
        Step("1.7b-compile-profile", 90, LARGE | COMPILE, 7, environment=compiled),
        Step("1.7b-eager-profile", 60, LARGE, 7, environment=eager),
        Step("1.7b-compile-fp8-profile", 90, LARGE | COMPILE | TENSORWISE, 7, environment=fp8),
        Step("attention", 60, command=(f"{HERE}/attention.py",), kernels=True),
        Step("torch-eager", 60, command=loop),
        Step("1.7b-recompute-full", 60, LARGE | {"layout.recompute": "full"}, 8),
    ]


def rest() -> list[Step]:
    """This GPU measured and planned; offloads, long sequences, experts and generation at a size that counts."""
    measure = (*SHARDWRIGHT, "measure", "--out", "OUT/machine.toml", "--device", "cuda", "--overwrite")
    plan = (
        *SHARDWRIGHT,
        "plan",
        "--model",
        "smollm2-1.7b",
        "--hardware",
        "OUT/machine.toml",
        "--cluster",
        "machine:1/1",
    )
    generate = (*SHARDWRIGHT, "generate", "WORK/1.7b-offload-optimizer", "--prompt", "import os")
    chunks = {"layout.recompute": "full", "layout.loss_chunk_tokens": 4096}
    on_cpu = {"layout.offload_optimizer": "cpu"}
    return [
        Step("1.7b-offload-activations", 70, LARGE | {"layout.offload_activations": "cpu"}, 8),
        Step("1.7b-offload-optimizer", 80, LARGE | on_cpu, 6, saves=True, on_mock={"model.preset": "smollm2-135m"}),
        Step("1b-32k", 80, LONG | chunks, 6),
        Step("2.6b-soft-caps", 90, CAPPED | chunks, 6),
        Step("2.4b-experts", 70, EXPERTS, 8),
        Step("2.4b-experts-compile", 90, EXPERTS | COMPILE, 8),
        Step("2.4b-experts-cuda-graphs", 90, EXPERTS | GRAPHS, 8, kernels=True),
        Step("135m-compile", 90, FEW | COMPILE, 20),
        Step("135m-cuda-graphs", 90, FEW | GRAPHS, 20, kernels=True),
        Step("1.7b-generate", 60, command=(*generate, "--max-tokens", "64", "--device", "cuda")),
        Step("measure", 240, command=measure),
        Step("plan-of-this-gpu", 30, command=(*plan, "--global-batch", "4", "--seq-len", "4096")),
    ]


PARTS = {1: smoke, 2: speed, 3: rest}
