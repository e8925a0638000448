"""A row of published measurements as a job and a layout.

Columns are those of the table that comes with Shardwright (`plan/measured/README.md`). An empty cell was not stated by
the source; what a prediction cannot do without is assumed, in words that go with the row.
"""

import re
from dataclasses import replace

import numpy as np

from shardwright.cost.hardware import Cluster, cluster, kind_of
from shardwright.cost.job import RECOMPUTE, Candidates, Job
from shardwright.cost.stack import STACKS, Stack
from shardwright.model.sections import MoESpec
from shardwright.model.spec import ModelSpec
from shardwright.plan.run_cells import OFF, Cells, Unusable, quoted
from shardwright.plan.run_check import check, check_experts
from shardwright.plan.run_model import HABITS, decoder, family, with_experts

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
_DATE = re.compile(r"(?<![\d.])(20[12]\d)(?:-?(?:0[1-9]|1[0-2])(?:-?[0-3]\d)?)?(?!\.?\d)")
"""When something was measured, by its year and mostly its month; numbers of arXiv look similar, after their point."""


class Row(Cells):
    """A row of that table."""

    def read(self) -> tuple[Job, Candidates]:
        """The job and its one layout. Raises Unusable, and InputError for an accelerator that is not known."""
        spec = self.model()
        stack = self.stack()
        n = self.number("n_gpus")
        tp, pp, cp, dp, ep = self.ranks(n, spec.moe)
        micro, total = self.number("micro_batch"), self.number("global_batch")
        if pp > 1 and total == micro * dp and micro % pp == 0 and stack.name.startswith("fsdp"):
            # torchtitan states a local batch, which its pipeline cuts into as many microbatches as it has ranks.
            micro //= pp
            self.assume(f"micro_batch={micro} (a local batch in {pp} parts)")
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
        found = Candidates(
            pp=pp,
            schedule=schedule,
            virtual_stages=virtual,
            stage_layers=layers,
            sequence_parallel=np.array([tp > 1 and self.sequence_parallel(stack)]),
            **{key: np.array([value], dtype=np.int64) for key, value in each.items()},  # type: ignore[arg-type]
        )
        check(job, found)
        return job, found

    def ranks(self, n: int, moe: MoESpec | None) -> tuple[int, int, int, int, int]:
        """tp, pp, cp, dp and ep."""
        tp, pp, cp, *_ = self.degrees("tp", "pp", "cp", *(("ep",) if moe else ()))
        ep = self.number("ep", 1)
        dp = self.number("dp", max(n // (tp * pp * cp), 1), "dp=n_gpus / (tp x pp x cp)")
        if tp * pp * cp * dp != n:
            raise Unusable(f"tp {tp} x pp {pp} x cp {cp} x dp {dp} = {tp * pp * cp * dp}, not n_gpus={n}")
        if moe is None and ep > 1:
            self.assume(f"ep={ep} does nothing without experts")
            ep = 1
        if (dp * cp * tp) % ep:
            raise Unusable(f"ep={ep} does not divide dp x cp x tp = {dp * cp * tp}")
        if moe is not None:
            check_experts(moe.n_experts, ep)
        return tp, pp, cp, dp, ep

    def sequence_parallel(self, stack: Stack) -> bool:
        """Whether ranks of tp cut the sequence between products; the first Megatron-LM did not, unless it is said."""
        if "SP" in self.text("recompute"):
            return True
        cuts = stack.name != "megatron"
        self.assume("sequence parallelism over tp" if cuts else "no sequence parallelism over tp")
        return cuts

    def model(self) -> ModelSpec:
        """Sizes from the row, the rest from the name of the model."""
        name, heads, hidden = self.text("model"), self.number("heads"), self.number("hidden")
        ffn = self.number("ffn", 4 * hidden, "ffn=4 x hidden")
        kind = family(name, gated=ffn != 4 * hidden)
        if kind is None:
            raise Unusable(f"{quoted(name)} is not a decoder")
        if hidden % heads:
            raise Unusable(f"heads={heads} does not divide hidden={hidden}")
        sizes = ModelSpec(
            n_layers=self.number("layers"),
            d_model=hidden,
            n_heads=heads,
            n_kv_heads=self.number("kv_heads", heads, "kv_heads=heads"),
            head_dim=hidden // heads,
            d_ffn=ffn,
            vocab_size=self.number("vocab", 51200, "vocab=51200 (GPT-2's, padded)"),
            max_seq_len=self.number("seq"),
        )
        spec = decoder(sizes, kind)
        self.assume(HABITS[kind])
        experts = self.number("experts", 0, least=0)
        if not experts:
            return spec
        moe = MoESpec(n_experts=experts, top_k=self.number("topk"), d_ffn=self.number("moe_ffn", ffn, "moe_ffn=ffn"))
        return with_experts(spec, moe, name)

    def stack(self) -> Stack:
        """By what the row says of ZeRO, the accelerator and in its notes."""
        said = f"{self.text('zero_stage')} {self.text('notes')}".lower()
        if any(word in said for word in ("fsdp", "full_shard", "shard_grad_op", "zero-3")):
            found = STACKS["fsdp"]
            if "compile" in said or self.precision() == "fp8":
                # torchtitan compiles the loss, too, since 2025.
                stated = _DATE.search(f"{self.text('source')} {self.text('ref')}")
                later = stated is not None and int(stated[1]) >= 2025
                found = STACKS["fsdp-compiled-loss" if later else "fsdp-compiled"]
            self.assume(f"stack {found.name}")
            if re.search(r"async ?tp", said):
                found = replace(found, speed=replace(found.speed, hides_tp=True))
            return found
        ampere = self.text("gpu").lower().startswith("a100")
        if ampere and not any(word in said for word in ("flash", "transformer engine")):
            self.assume("stack megatron (A100, no word of fused attention)")
            return STACKS["megatron"]
        fused_loss = "ce fusion" in said or "cross-entropy-loss-fusion" in said
        found = STACKS["megatron-core-fused-loss" if fused_loss else "megatron-core"]
        self.assume(f"stack {found.name}")
        if ampere or "no comm overlap" in said:
            # Sums over tp are hidden since Transformer Engine's userbuffers, which came with Hopper.
            found = replace(found, speed=replace(found.speed, hides_tp=False))
        if "no comm overlap" in said:
            found = replace(found, speed=replace(found.speed, hides_tp_backward=False, hides_dp=False))
        return found

    def cluster(self, n: int) -> Cluster:
        """The accelerators, with what the row says of their links."""
        if not self.text("gpu"):
            raise Unusable("gpu is empty")
        per_node = min(self.number("gpus_per_node", 8, "gpus_per_node=8 (usual)"), n)
        usual, said = cluster(f"{self.text('gpu')}:{n}/{per_node}"), self.text("interconnect")
        found = usual.described(said)
        if n > per_node and found == usual and kind_of(said) is None:
            self.assume(f"network between nodes as usual with {usual.accelerator.name}")
        return found

    def zero(self) -> int:
        """The stage of ZeRO."""
        text = self.text("zero_stage").lower()
        if not text:
            self.assume("zero_stage=0")
        for words, stage in ((("full_shard", "zero-3", "fsdp"), 3), (("shard_grad_op",), 2), (("dist-opt",), 1)):
            if any(word in text for word in words):
                return stage
        if text in OFF or text in ("ddp", "no_shard"):
            return 0
        match = re.search(r"\d+", text)
        if match is None or match[0] not in ("0", "1", "2", "3"):
            raise Unusable(
                f"zero_stage={quoted(text)} is no stage of ZeRO; valid: 0, 1, 2, 3, dist-opt, SHARD_GRAD_OP, FULL_SHARD"
            )
        return int(match[0])

    def pipeline(self, spec: ModelSpec, pp: int) -> tuple[str, int, tuple[int, ...] | None]:
        """Schedule, virtual stages and, where the layers divide evenly, how many each stage has."""
        if pp == 1:
            return "1f1b", 1, None
        # Embedding and head take the place of a layer each.
        fewer = "fewer layer" in self.text("notes")
        places = spec.n_layers + (2 if fewer else 0)
        schedule, virtual = self.schedule(places // pp)
        stages = pp * (2 if schedule in ("zb-v", "dualpipe-v") else virtual)
        if places % stages:
            return schedule, virtual, None
        layers = [places // stages] * stages
        if fewer:
            layers[0] -= 1
            layers[-1] -= 1
        return schedule, virtual, tuple(layers)

    def schedule(self, most_stages: int) -> tuple[str, int]:
        """The schedule, and the stages of a rank that have to be said for it; a rank has layers for `most_stages`."""
        said = self.text("schedule")
        text = re.sub(r"[^a-z0-9]", "", said.lower())
        if text not in SCHEDULES:
            raise Unusable(f"schedule={quoted(said)!r} is not known")
        schedule = SCHEDULES[text]
        if not text:
            self.assume("schedule=1f1b")
        if schedule in ("zb-v", "dualpipe-v"):
            return schedule, 2
        if self.text("vpp").lower().startswith("max"):
            virtual = most_stages
            if virtual < 1:
                raise Unusable(f"vpp={quoted(self.text('vpp'))}: fewer layers than ranks of pp")
        else:
            virtual = self.number("vpp", 0, least=0)
        if schedule == "interleaved-1f1b":
            if virtual == 0:
                self.assume("vpp=2 (usual)")
            elif virtual == 1:
                self.assume("vpp=1 read as plain 1f1b")
                return "1f1b", 1
            return schedule, virtual or 2
        if virtual > 1 and schedule == "1f1b":
            self.assume("schedule=interleaved-1f1b, as vpp is more than 1")
            return "interleaved-1f1b", virtual
        if virtual > 1:
            self.assume(f"vpp does nothing under {schedule}")
        return schedule, 1

    def recompute(self) -> str:
        """Recomputation, as far as the row says."""
        text = self.text("recompute").lower()
        if "full" in text:
            return "full"
        if "selective" in text or "sac" in text:
            return "selective"
        if not text:
            self.assume("recompute=none")
        elif re.split(r"[^a-z0-9]", text)[0] not in OFF:
            self.assume(f"recompute={quoted(text)!r} read as none")
        return "none"

    def precision(self) -> str:
        """Precision of the matrix products."""
        text = self.text("precision").lower()
        for name in ("fp8", "bf16", "fp16", "fp32"):
            if name in text:
                return name
        self.assume(f"precision={quoted(text)!r} read as bf16" if text else "precision=bf16")
        return "bf16"
