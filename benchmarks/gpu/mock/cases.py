"""The configurations that run on the mock: one list for a single device, one of layouts, one of the other verbs."""

from dataclasses import dataclass, field
from typing import Any

from shardwright.optimizers import OPTIMIZERS
from shardwright.schedule import registry

Settings = dict[str, Any]


@dataclass(frozen=True)
class Case:
    """A run of `train`, and the commands that use it. In `then`, RUN is the run's folder and TOKENS the data.
    `data.path` is one of the folders that check.py prepares: tokens, pairs or shards.

    `launched`: the command starts the ranks itself. `may_wait`: a step may read values
    back from the device, by docs/architecture.md.
    """

    name: str
    settings: Settings
    devices: int = 1
    launched: bool = False
    may_wait: bool = False
    then: tuple[tuple[str, ...], ...] = field(default=())


BF16 = {"precision.compute": "bf16"}
MOE = {"model.preset": "debug-moe", **BF16}
OFFLOAD_PARAMETERS = {"layout.zero": 3, "layout.offload_parameters": "cpu", "layout.offload_optimizer": "cpu"}
WIDE = {"model.d_model": 128, "model.d_ffn": 256, "model.n_kv_heads": 4, "model.head_dim": 64, "model.n_heads": 4}
"""Features in multiples of 128, which fp8 by blocks needs."""
LATENT = {"kv_rank": 16, "q_rank": 24, "nope_dim": 8, "rope_dim": 8, "v_dim": 16}
COMPILE = {"precision.compile": True}
SHARED_EXPERT = {"model.moe.n_shared": 1, "model.moe.first_dense": 1}
LINEAR = {f"model.linear_attention.{key}": n for key, n in {"n_k_heads": 2, "n_v_heads": 4, "k_dim": 16}.items()} | {
    "model.linear_attention.v_dim": 16,
    "model.linear_attention.full_interval": 2,
}
DOCUMENTS = {"data.attention": "document", "data.positions": "document"}
PAIRS = DOCUMENTS | {"data.path": "pairs", "preference.kind": "dpo"}
WINDOWS = {"model.window": 32, "model.global_interval": 2}
SOFTCAP = {"model.attention_softcap": 50.0, "model.logit_softcap": 30.0}


def single_device() -> list[Case]:
    """Every precision, saving of memory, optimizer and kind of model on one device."""
    recompute = {kind: {"layout.recompute": kind} for kind in ("selective", "full")}
    parts = {"layout.recompute_modules": ["norms", "activation", "attention", "rope"]}
    on_host = {"layout.offload_activations": "cpu", "layout.offload_min_bytes": 1024}
    settings: dict[str, Settings] = {
        "fp32": {},
        "tf32": {"precision.tf32": True},
        "fp64": {"precision.compute": "fp64"},
        "bf16": BF16,
        "fp16": {"precision.compute": "fp16"},
        "fp32 compile": COMPILE,
        "bf16 compile": BF16 | COMPILE,
        **{f"fp8 {kind}": BF16 | {"precision.fp8": kind} for kind in ("tensorwise", "rowwise")},
        "fp8 blockwise": BF16 | WIDE | {"precision.fp8": "blockwise"},
        "fp8 compile": BF16 | COMPILE | {"precision.fp8": "tensorwise"},
        "fp8 rowwise compile": BF16 | COMPILE | {"precision.fp8": "rowwise"},
        **{f"recompute {kind}": BF16 | each for kind, each in recompute.items()},
        **{f"recompute {kind} compile": BF16 | COMPILE | each for kind, each in recompute.items()},
        "recompute all parts": BF16 | recompute["selective"] | parts,
        "loss chunks": BF16 | {"layout.loss_chunk_tokens": 128},
        "loss chunks compile": BF16 | COMPILE | {"layout.loss_chunk_tokens": 128},
        "documents": BF16 | DOCUMENTS,
        "documents fp32": DOCUMENTS,
        "documents compile": BF16 | COMPILE | DOCUMENTS,
        "accumulation": BF16 | {"batch.micro_batch": 1},
        "dropout": BF16 | {"model.dropout": 0.1},
        "tied embeddings": BF16 | {"model.tied_embedding": True},
        "gpt": BF16 | {"model.norm": "layernorm", "model.activation": "gelu_tanh", "model.positions": "learned"},
        "muP": BF16 | {"mup.base_width": 32, "mup.base_depth": 2},
        "average on the host": BF16 | {"average.kind": "ema", "average.device": "cpu"},
        "average": BF16 | {"average.kind": "lawa", "average.last": 2},
        "average of the last": BF16 | {"average.kind": "last-k", "average.last": 2, "average.every": 2},
        "windows": BF16 | WINDOWS,
        "windows documents": BF16 | WINDOWS | DOCUMENTS,
        "windows fp32": WINDOWS,
        "sinks": BF16 | WINDOWS | {"model.attention_sinks": True},
        "soft caps": BF16 | WINDOWS | SOFTCAP,
        "soft caps documents": BF16 | SOFTCAP | DOCUMENTS,
        "linear attention": BF16 | LINEAR,
        "linear attention documents": BF16 | LINEAR | DOCUMENTS,
        "linear attention muon": BF16 | LINEAR | {"optimizer.name": "muon"},
        "pairs": BF16 | PAIRS,
        "pairs without a reference": BF16 | PAIRS | {"preference.kind": "simpo"},
        "shards": BF16 | {"data.path": "shards", "data.order": "shards"},
        "qk norm": BF16 | {"model.qk_norm": True},
        "latent attention": BF16 | {"model.n_kv_heads": 4, "model.latent_attention": LATENT},
        "multi-token prediction": BF16 | {"model.mtp_modules": 1},
        "experts": MOE,
        "experts fp32": {"model.preset": "debug-moe"},
        "experts compile": MOE | COMPILE,
        "experts fp8": MOE | {"precision.fp8": "tensorwise"},
        "experts shared": MOE | SHARED_EXPERT,
        "experts capacity": MOE | {"model.moe.capacity_factor": 1.25},
        "experts recompute full": MOE | recompute["full"],
        "experts recompute full compile": MOE | recompute["full"] | COMPILE,
        "offload activations": BF16 | on_host,
        "offload activations compile": BF16 | on_host | COMPILE,
        "offload activations recompute": BF16 | on_host | recompute["selective"],
        "offload parameters": BF16 | OFFLOAD_PARAMETERS,
        "offload optimizer cpu": BF16 | {"layout.offload_optimizer": "cpu"},
        "offload optimizer disk": BF16 | {"layout.offload_optimizer": "disk", "offload_path": "."},
        "checkpoints": BF16 | {"checkpoint.every": 2},
        "checkpoints async": BF16 | {"checkpoint.every": 2, "checkpoint.async_mode": "async"},
        "spikes": BF16 | {"faults.spike": "skip", "faults.recheck": True},
        "bf16 states": BF16 | {"optimizer.state_dtype": "bf16"},
        **{f"optimizer {name}": BF16 | {"optimizer.name": name} for name in OPTIMIZERS},
        "optimizer muon compile": BF16 | COMPILE | {"optimizer.name": "muon"},
        "optimizer adamw-8bit blocks": BF16 | {"optimizer.name": "adamw-8bit", "optimizer.least_elements": 256},
    }
    waits = {"fp16", "spikes", "experts fp32", "offload parameters", "offload optimizer disk"}
    # What writes a checkpoint waits for its copies in a thread of its own, which the check cannot tell from the step's.
    waits |= {"checkpoints async", "average on the host"}
    return [Case(name, each, launched=name == "bf16", may_wait=name in waits) for name, each in settings.items()]


def layout(devices: int, settings: Settings | None = None, **keys: Any) -> tuple[int, Settings]:
    """A layout in bf16 with any other settings."""
    return devices, BF16 | {f"layout.{key}": value for key, value in keys.items()} | (settings or {})


TOPK = {"layout.compress_gradients": "topk-4", "layout.zero": 0}


def layouts() -> list[Case]:
    """Every axis, ZeRO stage, way of context parallelism and schedule, alone and together."""
    each_schedule = {
        f"pp {name}": layout(2, pp=2, pp_schedule=name) for name in registry.names() if not name.startswith("dualpipe")
    }
    rows: dict[str, tuple[int, Settings]] = {
        "zero 0": layout(2, dp_replicate=2, zero=0),
        **{f"zero {zero}": layout(2, dp_shard=2, zero=zero) for zero in (1, 2, 3)},
        "replicas fp32": (2, {"layout.dp_replicate": 2}),
        "replicas of shards": layout(4, dp_replicate=2, dp_shard=2, zero=2),
        "zero 3 compile": layout(2, COMPILE, dp_shard=2, zero=3),
        "zero 3 offload parameters": layout(2, OFFLOAD_PARAMETERS, dp_shard=2),
        "zero 3 muon": layout(2, {"optimizer.name": "muon"}, dp_shard=2, zero=3),
        "zero 3 secondary": layout(4, dp_shard=4, zero=3, zero_secondary_ranks=2),
        "zero 3 int8 weights": layout(2, dp_shard=2, zero=3, compress_weights="int8"),
        "int8 gradients": layout(4, dp_shard=4, zero=2, compress_gradients="int8", node_ranks=2),
        "powersgd": (2, {"layout.dp_replicate": 2, "layout.compress_gradients": "powersgd-4"}),
        "tp": layout(2, tp=2),
        "tp without sequence parallel": layout(2, tp=2, sequence_parallel=False),
        "tp over kv heads": layout(4, tp=4),
        "tp fp8": layout(2, WIDE | {"precision.fp8": "tensorwise"}, tp=2),
        "tp recompute full": layout(2, tp=2, recompute="full"),
        **{f"cp {method}": layout(2, cp=2, cp_method=method) for method in ("zigzag", "ring", "allgather", "ulysses")},
        "cp usp": layout(4, cp=4, cp_method="usp", ulysses_degree=2),
        "cp documents": layout(2, {"data.attention": "document"}, cp=2),
        "cp soft caps": layout(2, WINDOWS | SOFTCAP, cp=2),
        "cp fp32": (2, {"layout.cp": 2}),
        "cp allgather fp32": (2, {"layout.cp": 2, "layout.cp_method": "allgather"}),
        "cp linear attention": layout(2, LINEAR, cp=2),
        "tp linear attention": layout(2, LINEAR, tp=2),
        "zero 3 linear attention muon": layout(2, LINEAR | {"optimizer.name": "muon"}, dp_shard=2, zero=3),
        "zero 3 average": layout(2, {"average.kind": "ema"}, dp_shard=2, zero=3),
        "zero 3 muP": layout(2, {"mup.base_width": 32, "mup.base_depth": 2}, dp_shard=2, zero=3),
        "zero 3 pairs": layout(2, PAIRS, dp_shard=2, zero=3),
        "tp pairs": layout(2, PAIRS, tp=2),
        "cp pairs": layout(2, PAIRS, cp=2),
        "cp ring pairs": layout(4, PAIRS, cp=4, cp_method="ring"),
        "pp pairs": layout(2, PAIRS, pp=2),
        "shards": layout(2, {"data.path": "shards", "data.order": "shards"}, dp_shard=2),
        **{
            f"topk {name}": (n, {f"layout.{key}": size for key, size in degrees.items()} | TOPK)
            for name, (n, degrees) in {
                "replicas": (2, {"dp_replicate": 2}),
                "cp": (2, {"cp": 2}),
                "tp": (4, {"dp_replicate": 2, "tp": 2}),
            }.items()
        },
        "topk ep": (2, {"model.preset": "debug-moe", "layout.cp": 2, "layout.ep": 2} | TOPK),
        **each_schedule,
        "pp dualpipe": layout(2, {"batch.micro_batch": 2}, pp=2, pp_schedule="dualpipe"),
        "pp dualpipe-v": layout(2, {"batch.micro_batch": 2}, pp=2, pp_schedule="dualpipe-v"),
        **{f"pp {how}": layout(2, pp=2, compress_pipeline=how) for how in ("int8", "fp8")},
        "pp int8 interleaved": layout(2, pp=2, pp_schedule="interleaved-1f1b", compress_pipeline="int8"),
        "pp zero 3 by microbatch": layout(4, pp=2, dp_shard=2, zero=3, zero_pp_gather="microbatch"),
        "pp tied embeddings": layout(2, {"model.tied_embedding": True}, pp=2),
        "pp multi-token prediction": layout(2, {"model.mtp_modules": 1}, pp=2),
        "ep": layout(2, MOE, dp_shard=2, ep=2),
        "ep compile": layout(2, MOE | COMPILE | SHARED_EXPERT, dp_shard=2, ep=2),
        "ep fp8 dispatch": layout(2, MOE, dp_shard=2, ep=2, compress_dispatch="fp8"),
        "ep placement": layout(2, MOE, dp_shard=2, ep=2, place_experts_every=1),
        "ep placement zero 3 average": layout(
            4, MOE | {"average.kind": "ema"}, dp_shard=4, ep=2, zero=3, place_experts_every=2
        ),
        "ep pp placement": layout(4, MOE, pp=2, dp_shard=2, ep=2, place_experts_every=1),
        "ep tp": layout(4, MOE, dp_shard=2, tp=2, ep=4),
        "ep pp": layout(4, MOE, pp=2, dp_shard=2, ep=2),
        "dp tp": layout(4, dp_shard=2, tp=2, zero=3),
        "cp tp": layout(4, cp=2, tp=2),
        "dp tp pp": layout(8, dp_shard=2, tp=2, pp=2, zero=2),
        "dp cp pp": layout(8, dp_shard=2, cp=2, pp=2, pp_schedule="interleaved-1f1b"),
        "dp cp tp": layout(8, dp_shard=2, cp=2, tp=2, zero=3),
        "ep tp pp": layout(8, MOE, dp_shard=2, tp=2, pp=2, ep=2, pp_schedule="zb-h1"),
    }
    waits = {"zero 3 offload parameters", "topk ep", *(name for name in rows if "placement" in name)}
    return [
        Case(f"layout {name}", settings, devices, launched=name == "tp", may_wait=name in waits)
        for name, (devices, settings) in rows.items()
    ]


def _set(*settings: str) -> tuple[str, ...]:
    return tuple(word for setting in settings for word in ("--set", setting))


def verbs() -> list[Case]:
    """The other verbs that use a GPU, on a run that has just been trained."""
    generate = ("generate", "RUN", "--prompt", "import os", "--device", "cuda")
    score = ("eval", "RUN", "--data", "TOKENS", "--samples", "8", "--device", "cuda")
    more = ("train", "RUN/run.toml", "--resume", "--set", "steps=6")
    adapters = ("train", "RUN/run.toml", *_set("init.weights=RUN", "lora.rank=4", "out=RUN/adapters"))
    of_experts = "lora.targets=['experts']"
    commands: dict[str, tuple[int, Settings, tuple[str, ...]]] = {
        "generate": (1, BF16, (*generate, "--max-tokens", "8")),
        "generate greedy": (1, BF16, (*generate, "--max-tokens", "8", "--greedy")),
        "generate batch": (1, BF16, (*generate, "--prompt", "def", "--max-tokens", "8", "--batch-size", "2")),
        "generate draft": (1, BF16, (*generate, "--max-tokens", "8", "--draft", "RUN")),
        "generate experts": (1, MOE, (*generate, "--max-tokens", "8")),
        "generate tp": (2, BF16, (*generate, "--max-tokens", "8", "--layout", "tp=2")),
        "eval": (1, BF16, score),
        "eval documents": (1, BF16 | {"data.attention": "document"}, score),
        "eval tp": (2, BF16, (*score, "--layout", "tp=2")),
        "adapters": (1, BF16, adapters),
        "adapters compile": (1, BF16, (*adapters, *_set("precision.compile=true"))),
        "adapters zero 3": (2, BF16, (*adapters, *_set("layout.zero=3"))),
        "adapters tp": (2, BF16, (*adapters, *_set("layout.tp=2", "layout.dp_shard=1"))),
        "adapters dropout": (1, BF16, (*adapters, *_set("lora.dropout=0.1"))),
        "adapters of experts": (1, MOE, (*adapters, *_set("lora.rank=8", of_experts))),
        "adapters of experts ep": (2, MOE, (*adapters, *_set("lora.rank=8", of_experts, "layout.ep=2"))),
        **{
            f"adapters {base}": (1, BF16, (*adapters, *_set(f"lora.base={base}", "lora.dropout=0.1")))
            for base in ("int8", "nf4")
        },
        "adapters nf4 zero 2": (2, BF16, (*adapters, *_set("lora.base=nf4", "layout.zero=2"))),
        "adapters nf4 experts": (1, MOE, (*adapters, *_set("lora.rank=8", of_experts, "lora.base=nf4"))),
        "generate batch invariant": (1, BF16, (*generate, "--max-tokens", "8", "--batch-invariant")),
        "generate soft caps": (1, BF16 | WINDOWS | SOFTCAP, (*generate, "--max-tokens", "8")),
        "generate linear attention": (1, BF16 | LINEAR, (*generate, "--max-tokens", "8")),
        "resume": (1, BF16, more),
        "resume average": (1, BF16 | {"average.kind": "ema"}, more),
        "resume shards": (1, BF16 | {"data.path": "shards", "data.order": "shards"}, more),
        "resume placement": (
            2,
            MOE | {"layout.ep": 2, "layout.place_experts_every": 1, "checkpoint.every": 2},
            more,
        ),
        "resume offload": (1, BF16 | {"layout.offload_optimizer": "cpu"}, more),
    }
    with_run = [
        Case(f"verb {name}", settings | {"layout.dp_shard": n}, then=(then,), devices=n)
        for name, (n, settings, then) in commands.items()
    ]
    measure: list[tuple[str, ...]] = [("measure", "--out", "RUN/machine.toml", "--device", "cuda", "--budget", "0.05")]
    small = ("--model", "debug", "--global-batch", "8", "--seq-len", "128")
    measure += [("plan", *small, "--hardware", "RUN/machine.toml", "--cluster", "machine:1/1")]
    return [
        *with_run,
        Case("verb measure", BF16, then=tuple(measure)),
        Case("verb measure 2", BF16 | {"layout.dp_shard": 2}, 2, then=tuple(measure[:1])),
    ]


CASES = [*single_device(), *layouts(), *verbs()]
