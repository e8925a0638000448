"""Measured points of curves, as plain numbers."""

from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class MatmulPoint:
    """A matmul of (m, k) by (k, n) in `precision`."""

    precision: str
    m: int
    k: int
    n: int
    seconds: float

    @property
    def flops(self) -> float:
        """Return 2 m k n."""
        return 2.0 * self.m * self.k * self.n


@dataclass(frozen=True)
class AttentionPoint:
    """Causal attention of `batch` sequences of `length` tokens, with `heads` heads of `width`."""

    batch: int
    length: int
    heads: int
    width: int
    forward_s: float
    backward_s: float

    @property
    def flops(self) -> float:
        """Return the forward FLOPs as in `cost.layer`: half of the scores, and whole blocks on the diagonal."""
        return 4.0 * self.batch * self.length**2 * self.heads * self.width * (0.5 + 64 / self.length)


@dataclass(frozen=True)
class KernelPoint:
    """An element-wise operation, forward and backward, on `elements` elements, counted as in `cost.speed`. `passes`:
    its time in the cost model, in units of the forward pass. `element_bytes`: relative to 2."""

    name: str
    elements: float
    passes: float
    widths: float
    seconds: float


@dataclass(frozen=True)
class CopyPoint:
    """A copy: `n_bytes` read and as many written."""

    n_bytes: int
    seconds: float


@dataclass(frozen=True)
class MessagePoint:
    """A collective, or a send, over `ranks` with a buffer of `n_bytes` (`cost.collectives`)."""

    collective: str
    ranks: int
    n_bytes: int
    seconds: float


@dataclass(frozen=True)
class Overheads:
    """Overheads in seconds: of a layer's launches, forward and backward together; of embedding, head and loss; of a
    step; of each message of parameters. `backward`: of a layer relative to its forward pass."""

    layer_s: float
    ends_s: float
    step_s: float
    backward: float
    bucket_s: float = 0.0


@dataclass(frozen=True)
class CachedPoint:
    """Attention of one new token of each of `sequences` to `positions` cached tokens, with `heads` heads of `width`."""

    sequences: int
    heads: int
    positions: int
    width: int
    seconds: float

    @property
    def flops(self) -> float:
        """Return the FLOPs of scores and weighted sums."""
        return 4.0 * self.sequences * self.heads * self.positions * self.width


@dataclass(frozen=True)
class GenerationPoints:
    """Overheads of `shardwright generate` in seconds: of a layer; of a pass; of each sequence in a pass, and in a layer
    of a decode pass; of each prompt in a layer. `split_layer_s`, `split_pass_s`: on two ranks of tp, without the
    collectives. `matmuls`: of few tokens, each with weights that no previous matmul has read. `cached`: attention of
    decode passes."""

    layer_s: float
    pass_s: float
    request_s: float
    sequence_s: float
    prompt_s: float
    split_layer_s: float
    split_pass_s: float
    matmuls: tuple[MatmulPoint, ...]
    cached: tuple[CachedPoint, ...]


@dataclass(frozen=True)
class WholeStep:
    """A step of `ranks` ranks of the training program (`measuring.whole_steps`). `layout`: its settings, as in a run
    file. `peak_bytes`: the peak memory of a rank's process."""

    ranks: int
    layout: dict[str, Any]
    micro_batch: int
    seconds: float
    peak_bytes: int


@dataclass(frozen=True)
class RankPoints:
    """Measurements of a rank while the other ranks of its node measure the same."""

    ranks: int
    threads: int
    memory_bytes: float
    process_bytes: float
    matmuls: tuple[MatmulPoint, ...]
    attention: tuple[AttentionPoint, ...]
    kernels: tuple[KernelPoint, ...]
    copies: tuple[CopyPoint, ...]
    overheads: Overheads
    generation: GenerationPoints | None = None
    steps: tuple[WholeStep, ...] = ()


@dataclass(frozen=True)
class MachineMeasurements:
    """All measurements. `ranks`: by the number of ranks of a node. `inside`, `across`: messages in a node and between
    nodes. The bandwidths of the link to the host and of a disk are in bytes per second, 0 if not measured."""

    name: str
    clock: str
    on_host: bool
    cores: int
    took_s: float
    ranks: tuple[RankPoints, ...]
    inside: tuple[MessagePoint, ...] = ()
    across: tuple[MessagePoint, ...] = ()
    host_bytes_per_s: float = 0.0
    disk_bytes_per_s: float = 0.0
    remarks: tuple[str, ...] = ()

    def as_json(self) -> dict[str, Any]:
        """Return one JSON document."""
        return asdict(self)
