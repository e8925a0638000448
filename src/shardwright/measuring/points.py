"""What is measured, as plain numbers: points of curves."""

from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(frozen=True)
class MatmulPoint:
    """(m, k) by (k, n) in `precision`."""

    precision: str
    m: int
    k: int
    n: int
    seconds: float

    @property
    def flops(self) -> float:
        """2 m k n."""
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
        """Forward, as `cost.layer` counts them: half of the scores, and whole blocks on the diagonal."""
        return 4.0 * self.batch * self.length**2 * self.heads * self.width * (0.5 + 64 / self.length)


@dataclass(frozen=True)
class KernelPoint:
    """An element-wise operation of ours, forward and backward, on `elements`, as `cost.speed` counts them; `passes`:
    those of the cost model's time, in units of the forward pass; `element_bytes` relative to 2."""

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
    """Seconds: of a layer's launches, forward and backward together; of embedding, head and loss; of a step; of each
    message of parameters. `backward`: of a layer relative to its forward pass."""

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
        """Scores and weighted sums."""
        return 4.0 * self.sequences * self.heads * self.positions * self.width


@dataclass(frozen=True)
class GenerationPoints:
    """Seconds of passes of `shardwright generate` beside their work: of a layer; of a pass; of each sequence in a pass,
    and in a layer of a decode pass; of each prompt in a layer. `split_layer_s`, `split_pass_s`: of two ranks of tp,
    without the collectives. `matmuls`: of few tokens, each with weights that no matmul before it has read. `cached`:
    attention of decode passes."""

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
    file; `peak_bytes`: the most that a rank's process held."""

    ranks: int
    layout: dict[str, Any]
    micro_batch: int
    seconds: float
    peak_bytes: int


@dataclass(frozen=True)
class RankPoints:
    """Of a rank, while the others of its node do the same."""

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
    """All that was measured. `ranks`: by the ranks of a node; `inside`, `across`: messages in a node and between nodes;
    bytes per second of the link to the host and of a disk, 0 if not measured."""

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
    remarks: tuple[str, ...] = field(default=())

    def as_json(self) -> dict[str, Any]:
        """One JSON document."""
        return asdict(self)
