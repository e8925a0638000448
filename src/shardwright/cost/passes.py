"""Seconds of the forward and backward passes of one micro-batch in a part of the model, by kind of work."""

from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import ArrayLike

from shardwright.cost import ledger
from shardwright.cost.blocks import BlockShape
from shardwright.cost.collectives import PricedMessage
from shardwright.cost.job import Candidates, Floats, Job
from shardwright.cost.ledger import Formulas
from shardwright.model.spec import ModelSpec

PRODUCT_BYTES = 4
"""Bytes that a product by a number, or a copy, moves for a 16-bit element: read and written."""


@dataclass
class Passes:
    """Seconds of F, I and W of one micro-batch, by kind of work, each an array (n,). `part`: the part of the model.
    `messages`: sent by a rank in all three. `forward_messages`: sent in F, by kind; recomputation repeats them."""

    part: str
    forward: dict[str, Floats] = field(default_factory=dict)
    backward_input: dict[str, Floats] = field(default_factory=dict)
    weight: dict[str, Floats] = field(default_factory=dict)
    messages: list[PricedMessage] = field(default_factory=list)
    forward_messages: dict[str, list[PricedMessage]] = field(default_factory=dict)

    def add(self, kind: str, forward: ArrayLike, backward_input: ArrayLike, weight: ArrayLike = 0.0) -> None:
        """Add seconds of a kind."""
        for part, seconds in zip(self.parts.values(), (forward, backward_input, weight), strict=True):
            part[kind] = part.get(kind, np.zeros(())) + np.asarray(seconds, dtype=np.float64)

    def record(self, message: PricedMessage, forward: str = "") -> None:
        """Record a message that is sent; `forward`: its kind, if it is a message of F."""
        self.messages.append(message)
        if forward:
            self.forward_messages.setdefault(forward, []).append(message)

    def send(self, job: Job, message: PricedMessage, kind: str, forward: str = "") -> Floats:
        """Record a message and return its total time over all calls, in seconds. `kind`: its kind of work."""
        self.record(replace(message, work=kind), forward)
        return message.seconds(job.cluster, job.stack.speed.slowdown(kind))

    @property
    def totals(self) -> tuple[Floats, Floats, Floats]:
        """Return the seconds of F, I and W."""
        forward, backward_input, weight = (sum(part.values(), np.zeros(1)) for part in self.parts.values())
        return forward, backward_input, weight

    def kind_s(self, kind: str) -> Floats:
        """Return the sum of the seconds of F, I and W of one kind."""
        return sum((part.get(kind, np.zeros(1)) for part in self.parts.values()), np.asarray(0.0))

    def note(self) -> None:
        """Record the sums of each pass, and of each kind of work."""
        for name, part in self.parts.items():
            ledger.total(f"{name} of {self.part}", {f"{kind}, {name}": seconds for kind, seconds in part.items()})
        for kind in self.forward:
            passes = {f"{kind}, {name}": part[kind] for name, part in self.parts.items()}
            ledger.total(f"{kind} of {self.part}", passes)

    @property
    def parts(self) -> dict[str, dict[str, Floats]]:
        """Return the seconds by pass: F, I and W."""
        return {"F": self.forward, "I": self.backward_input, "W": self.weight}


def reached_bytes_per_s(job: Job) -> Floats:
    """Return the memory bandwidth that element-wise kernels of the stack reach, in bytes/s."""
    chip = job.cluster.accelerator
    f = Formulas(
        "B/s", bandwidth=chip.memory_bytes_per_s, copy_share=chip.memory_share,
        lasting_share=job.calibration.memory_share, kernel_share=job.stack.speed.on(chip.die).kernel_share,
    )  # fmt: skip
    rate = f.bandwidth * f.copy_share * f.lasting_share * f.kernel_share
    return f("rate of element-wise kernels", rate, "cost/hardware.toml, cost/calibration.toml", at="Rates")


def kernel_symbols(job: Job, candidates: Candidates, block: BlockShape) -> Formulas:
    """Return the sizes of a layer on a rank, and the bytes that element-wise kernels move for a 16-bit element."""
    spec, speed, tokens = job.model, job.stack.speed, candidates.tokens(job.seq_len)
    return Formulas(
        "B", norms=block.norms, norm_bytes=speed.norm_bytes if spec.norm == "layernorm" else speed.rmsnorm_bytes,
        branches=block.branches, residual_bytes=speed.residual_bytes,
        dropout_bytes=speed.dropout_bytes if spec.dropout else 0.0,
        T=tokens, T_shard=tokens / candidates.token_shards, h=spec.d_model, tp=candidates.tp,
        heads=spec.n_heads, kv_heads=spec.n_kv_heads, c=spec.head_dim, qk_dim=spec.qk_dim,
        heads_bytes=speed.heads_bytes, rope_bytes=speed.rope_bytes, top_k=0 if spec.moe is None else spec.moe.top_k,
        inner=block.inner, expert_inner=block.expert_inner, permute_bytes=speed.permute_bytes,
        activation_bytes=speed.gated_bytes if block.gated else speed.gelu_bytes,
        e=job.element_bytes, element_rate=reached_bytes_per_s(job),
    )  # fmt: skip


def rotating_share(spec: ModelSpec) -> float:
    """Return the share of the layers whose queries and keys are rotated."""
    return sum(map(spec.rotates, range(spec.n_layers))) / spec.n_layers


def rotation_bytes(f: Formulas, job: Job) -> Floats:
    """Return the bytes that rotary embedding moves for a 16-bit element of a query or key head, over all layers."""
    n_bytes = f.rope_bytes
    if job.model.rope_fraction < 1:
        f.add(rope_fraction=job.model.rope_fraction, product_bytes=PRODUCT_BYTES)
        # A fused kernel copies the other elements; else a concatenation copies all.
        copied = 1 - f.rope_fraction if job.stack.speed.rope_bytes <= PRODUCT_BYTES else f.constant(1)
        n_bytes = f.rope_bytes * f.rope_fraction + f.product_bytes * copied
    return n_bytes * rotating_share(job.model)
