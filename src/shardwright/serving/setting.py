"""The model and machine that serve (`Serving`) and their layouts (`Settings`), as arrays: one layout or ten thousand.

An instance serves requests on tp x dp x pp accelerators. With dp > 1, attention is replicated: each group of tp ranks
has its own requests (dp attention). The experts of a layer are sharded over all tp x dp ranks of a stage, ep ways by
experts and tp x dp / ep ways within each. A cluster may have several instances.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from shardwright.cost.hardware import Cluster
from shardwright.cost.job import Floats, Ints
from shardwright.model.spec import ModelSpec
from shardwright.serving.formats import FORMATS, computed_in
from shardwright.serving.rates import Rates


@dataclass(frozen=True, kw_only=True)
class Serving:
    """`precision`: of the matrices of the layers, a name in `serving.formats.FORMATS`; embedding and head have at least
    16 bits. `kv_precision`: of the cache, a name in `serving.formats.CACHE_BYTES`. `rates`: fitted constants of the
    engine on this accelerator."""

    model: ModelSpec
    cluster: Cluster
    rates: Rates
    precision: str = "bf16"
    kv_precision: str = "bf16"

    @property
    def on_host(self) -> bool:
        """Return whether the processor that computes also runs Python, and passes of `generate` were measured on it
        (`serving.host`)."""
        chip = self.cluster.accelerator
        return chip.on_host and chip.rates is not None and chip.rates.generation is not None

    @property
    def wide(self) -> str:
        """Return the precision of attention, the head and the residual stream."""
        wide = FORMATS[self.precision].wide
        return wide if wide in self.cluster.accelerator.flops_per_s else "fp16"

    @property
    def compute(self) -> str:
        """Return the format in which matmuls with the matrices of the layers compute."""
        form = computed_in(self.precision, self.cluster.accelerator)
        assert form is not None, self.precision
        return form

    @property
    def weight_bytes(self) -> float:
        """Return the bytes of an element of a layer's matrices."""
        return FORMATS[self.precision].n_bytes

    @property
    def sent_bytes(self) -> float:
        """Return the bytes of an element of a token that is sent to experts: in the format of their matmuls."""
        return FORMATS[self.compute].n_bytes

    @property
    def wide_bytes(self) -> int:
        """Return the bytes of an element of `wide`."""
        return int(FORMATS[self.wide].n_bytes)

    def flops_per_s(self, precision: str) -> Floats:
        """Return the FLOP/s that matmuls of the best shapes reach."""
        chip = self.cluster.accelerator
        return np.asarray(chip.flops_per_s[precision] * chip.matmul_share[precision] * self.rates.matmul_share)

    @property
    def bytes_per_s(self) -> Floats:
        """Return the memory bandwidth that reading weights reaches, in bytes/s."""
        return np.asarray(self.cluster.accelerator.memory_bytes_per_s * self.rates.memory_share)


class Degrees(NamedTuple):
    """The degrees of one layout."""

    tp: int
    pp: int = 1
    dp: int = 1
    ep: int = 1

    def __str__(self) -> str:
        names = {"tp": self.tp, "pp": self.pp, "dp attention": self.dp, "ep": self.ep}
        return ", ".join(f"{name} {degree}" for name, degree in names.items() if degree > 1 or name == "tp")

    @property
    def size(self) -> int:
        """Return the number of accelerators of an instance."""
        return self.tp * self.pp * self.dp


@dataclass(frozen=True)
class Settings:
    """Layouts of an instance, arrays of shape (n,)."""

    tp: Ints
    pp: Ints
    dp: Ints
    ep: Ints

    @staticmethod
    def from_layouts(layouts: Sequence[Degrees]) -> "Settings":
        """Convert layouts to arrays."""
        return Settings(*np.asarray(layouts, dtype=np.int64).reshape(-1, 4).T)

    @property
    def stage_ranks(self) -> Ints:
        """Return the ranks of a pipeline stage, which share the experts of a layer."""
        return self.tp * self.dp

    @property
    def expert_tp(self) -> Ints:
        """Return the number of ranks over which the matrices of one expert are sharded."""
        return self.stage_ranks // self.ep

    @property
    def size(self) -> Ints:
        """Return the number of accelerators of an instance."""
        return self.tp * self.pp * self.dp


@dataclass(frozen=True)
class PassBatch:
    """The work of one pass over the model, of a whole instance; numbers or arrays (n,).

    `requests`: number of requests that decode one token each, with `context` cached tokens each on average. `prompt`:
    tokens of prompts; each attends to `attended` tokens on average. `logits`: positions whose next token is chosen.
    `drafted`: additional tokens that are verified for each request, in speculative decoding.
    """

    requests: ArrayLike = 0.0
    context: ArrayLike = 0.0
    prompt: ArrayLike = 0.0
    attended: ArrayLike = 0.0
    logits: ArrayLike = 0.0
    drafted: ArrayLike = 0.0

    def shared(self, parts: ArrayLike) -> "PassBatch":
        """Return the part of one of `parts` micro-batches or replicas; a part has one request or none."""
        split = np.asarray(parts)
        requests = np.asarray(self.requests, dtype=np.float64)
        return PassBatch(
            requests / split, self.context, np.asarray(self.prompt) / split, self.attended,
            np.asarray(self.logits) / split, self.drafted,
        )  # fmt: skip

    @property
    def prompts(self) -> Floats:
        """Return the number of prompts whose last token is in this pass."""
        decoded = np.asarray(self.requests) * (1.0 + np.asarray(self.drafted))
        return np.asarray(np.maximum(np.asarray(self.logits) - decoded, 0.0))

    @property
    def tokens(self) -> Floats:
        """Return the number of tokens that go through the matmuls."""
        return np.asarray(np.asarray(self.requests) * (1.0 + np.asarray(self.drafted)) + np.asarray(self.prompt))
