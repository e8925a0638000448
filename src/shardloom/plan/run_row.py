"""A row of published measurements as a job and a layout.

Columns are those of the table that comes with Shardloom (`plan/measured/README.md`). An empty cell was not stated by
the source; what a prediction cannot do without is assumed, in words that go with the row.
"""

import re
from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from shardloom.cost.hardware import Cluster, cluster
from shardloom.cost.job import RECOMPUTE, Candidates, Job
from shardloom.cost.stack import STACKS, Stack
from shardloom.model.sections import MoESpec
from shardloom.model.spec import ModelSpec
from shardloom.plan.run_model import decoder, family, with_experts

SCHEDULES = {
    "": "1f1b",
    "1f1b": "1f1b",
    "1f1bi": "interleaved-1f1b",
    "interleaved": "interleaved-1f1b",
    "interleaved1f1b": "interleaved-1f1b",
    "gpipe": "afab",
    "afab": "afab",
    "zb2p": "zb-h2",
    "zbh2": "zb-h2",
    "zb1p": "zb-h1",
    "zbh1": "zb-h1",
    "zbv": "zb-v",
    "dualpipe": "dualpipe",
    "dualpipev": "dualpipe-v",
}


class Unusable(Exception):
    """Why a row cannot be predicted."""


class Row:
    """The cells of a row, and what had to be assumed on the way."""

    def __init__(self, cells: Mapping[str, str]) -> None:
        self.cells = cells
        self.assumed: list[str] = []

    def optional(self, column: str) -> float | None:
        """A number, or None for an empty cell."""
        text = self.cells.get(column, "")
        if not text:
            return None
        try:
            value = float(text)
        except ValueError:
            raise Unusable(f"{column}={text!r} is not a number") from None
        if value <= 0 or value != value:
            raise Unusable(f"{column}={text} is not positive")
        return value

    def number(self, column: str, default: int | None = None, why: str = "") -> int:
        """A whole number; with a default, for an empty cell that and a word about it where `why` says one."""
        value = self.optional(column)
        if value is None:
            if default is None:
                raise Unusable(f"{column} is empty")
            if why:
                self.assumed.append(f"{column}={default} ({why})")
            return default
        if value != int(value):
            raise Unusable(f"{column}={self.cells[column]} is not a whole number")
        return int(value)

    def read(self) -> tuple[Job, Candidates]:
        """The job and its one layout. Raises Unusable, and InputError for an accelerator that is not known."""
        spec = self.model()
        stack = self.stack()
        n = self.number("n_gpus")
        tp, pp, cp = (self.number(axis, 1) for axis in ("tp", "pp", "cp"))
        ep = self.number("ep", 1)
        dp = self.number("dp", max(n // (tp * pp * cp), 1))
        if tp * pp * cp * dp != n:
            raise Unusable(f"tp {tp} x pp {pp} x cp {cp} x dp {dp} = {tp * pp * cp * dp}, not n_gpus={n}")
        if spec.n_heads % tp or (dp * cp * tp) % ep:
            raise Unusable(
                f"tp={tp} does not divide {spec.n_heads} heads, or ep={ep} not dp x cp x tp = {dp * cp * tp}"
            )
        micro, total = self.number("micro_batch"), self.number("global_batch")
        if pp > 1 and total == micro * dp and micro % pp == 0 and stack.name.startswith("fsdp"):
            # torchtitan states a local batch, which its pipeline cuts into as many microbatches as it has ranks.
            micro //= pp
            self.assumed.append(f"micro_batch={micro} (a local batch in {pp} parts)")
        if total % (micro * dp):
            raise Unusable(f"global_batch={total} is not a multiple of micro_batch {micro} x dp {dp}")
        zero = self.zero()
        schedule, virtual, layers = self.pipeline(spec, pp)
        recompute = self.recompute()
        job = Job(
            model=spec,
            cluster=self.cluster(n),
            seq_len=self.number("seq"),
            global_batch=total,
            precision=self.precision(),
            stack=stack,
        )
        each = {
            "dp_replicate": 1 if zero else dp,
            "dp_shard": dp if zero else 1,
            "cp": cp,
            "tp": tp,
            "ep": ep,
            "zero": zero,
            "micro_batch": micro,
            "recompute": RECOMPUTE.index(recompute),
        }
        sequence_parallel = tp > 1 and (stack.name != "megatron" or "SP" in self.cells.get("recompute", ""))
        return job, Candidates(
            pp=pp,
            schedule=schedule,
            virtual_stages=virtual,
            stage_layers=layers,
            sequence_parallel=np.array([sequence_parallel]),
            **{key: np.array([value], dtype=np.int64) for key, value in each.items()},  # type: ignore[arg-type]
        )

    def model(self) -> ModelSpec:
        """Sizes from the row, the rest from the name of the model."""
        name, heads, hidden = self.cells["model"], self.number("heads"), self.number("hidden")
        ffn = self.number("ffn", 4 * hidden, "4 x hidden")
        kind = family(name, gated=ffn != 4 * hidden)
        if kind is None:
            raise Unusable(f"{name} is not a decoder")
        sizes = ModelSpec(
            n_layers=self.number("layers"),
            d_model=hidden,
            n_heads=heads,
            n_kv_heads=self.number("kv_heads", heads),
            head_dim=hidden // heads,
            d_ffn=ffn,
            vocab_size=self.number("vocab", 51200, "GPT-2's, padded"),
            max_seq_len=self.number("seq"),
        )
        spec = decoder(sizes, kind)
        experts = self.number("experts", 0)
        if not experts:
            return spec
        moe = MoESpec(n_experts=experts, top_k=self.number("topk"), d_ffn=self.number("moe_ffn", ffn, "ffn"))
        return with_experts(spec, moe, name)

    def stack(self) -> Stack:
        """By what the row says of ZeRO, the accelerator and in its notes."""
        said = f"{self.cells.get('zero_stage', '')} {self.cells.get('notes', '')}".lower()
        if any(word in said for word in ("fsdp", "full_shard", "shard_grad_op", "zero-3")):
            found = STACKS["fsdp"]
            if "compile" in said or self.precision() == "fp8":
                # torchtitan compiles the loss, too, since 2025.
                later = "2025" in self.cells.get("source", "")
                found = STACKS["fsdp-compiled-loss" if later else "fsdp-compiled"]
            if re.search(r"async ?tp", said):
                found = replace(found, speed=replace(found.speed, hides_tp=True))
            return found
        ampere = self.cells["gpu"].lower().startswith("a100")
        if ampere and not any(word in said for word in ("flash", "transformer engine")):
            self.assumed.append("stack megatron (A100, no word of fused attention)")
            return STACKS["megatron"]
        fused_loss = "ce fusion" in said or "cross-entropy-loss-fusion" in said
        found = STACKS["megatron-core-fused-loss" if fused_loss else "megatron-core"]
        self.assumed.append(f"stack {found.name}")
        if ampere or "no comm overlap" in said:
            # Sums over tp are hidden since Transformer Engine's userbuffers, which came with Hopper.
            found = replace(found, speed=replace(found.speed, hides_tp=False))
        if "no comm overlap" in said:
            found = replace(found, speed=replace(found.speed, hides_tp_backward=False, hides_dp=False))
        return found

    def cluster(self, n: int) -> Cluster:
        """The accelerators, with what the row says of their links."""
        per_node = min(self.number("gpus_per_node", 8, "usual"), n)
        found = cluster(f"{self.cells['gpu']}:{n}/{per_node}")
        return found.described(self.cells.get("interconnect", ""))

    def zero(self) -> int:
        """The stage of ZeRO."""
        text = self.cells.get("zero_stage", "").lower()
        for words, stage in ((("full_shard", "zero-3", "fsdp"), 3), (("shard_grad_op",), 2), (("dist-opt",), 1)):
            if any(word in text for word in words):
                return stage
        match = re.search(r"\d", text)
        return int(match[0]) if match else 0

    def pipeline(self, spec: ModelSpec, pp: int) -> tuple[str, int, tuple[int, ...] | None]:
        """Schedule, virtual stages and, where the layers divide evenly, how many each stage has."""
        if pp == 1:
            return "1f1b", 1, None
        text = re.sub(r"[^a-z0-9]", "", self.cells.get("schedule", "").lower())
        if text not in SCHEDULES:
            raise Unusable(f"schedule={self.cells['schedule']!r} is not known")
        schedule = SCHEDULES[text]
        # Embedding and head take the place of a layer each.
        fewer = "fewer layer" in self.cells.get("notes", "")
        places = spec.n_layers + (2 if fewer else 0)
        virtual = 1
        if schedule == "interleaved-1f1b":
            vpp = self.cells.get("vpp", "")
            if vpp.startswith("max"):
                virtual = places // pp
            else:
                virtual = self.number("vpp", 2, "usual")
        elif schedule in ("zb-v", "dualpipe-v"):
            virtual = 2
        stages = pp * virtual
        if places % stages:
            return schedule, virtual, None
        layers = [places // stages] * stages
        if fewer:
            layers[0] -= 1
            layers[-1] -= 1
        return schedule, virtual, tuple(layers)

    def recompute(self) -> str:
        """Recomputation, as far as the row says."""
        text = self.cells.get("recompute", "").lower()
        if "full" in text:
            return "full"
        if "selective" in text or "sac" in text:
            return "selective"
        if not text:
            self.assumed.append("recompute=none")
        return "none"

    def precision(self) -> str:
        """Precision of the matrix products."""
        text = self.cells.get("precision", "").lower()
        for name in ("fp8", "bf16", "fp16", "fp32"):
            if name in text:
                return name
        self.assumed.append("precision=bf16")
        return "bf16"
