"""The input of the cost model: a job (model, cluster, batch, software stack) and candidate layouts, many at once.

The formulas of this package are numpy expressions over `Candidates`, so the same code evaluates one layout or ten
thousand. Shapes: n candidates, S stages of the pipeline in the order of the forward pass, R ranks of `pp`.
"""

from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardwright.cost.calibration import CALIBRATED, Calibration
from shardwright.cost.expert_load import UnevenLoad
from shardwright.cost.formats import FORMATS
from shardwright.cost.hardware import Cluster
from shardwright.cost.stack import SHARDWRIGHT, SHARDWRIGHT_COMPILED, Stack
from shardwright.layout.keys import KEYS, RECOMPUTE
from shardwright.layout.layout import Layout
from shardwright.model.pieces import needs_equal_heads, scores_in_rows
from shardwright.model.spec import ModelSpec
from shardwright.optimizers import OPTIMIZERS, OptimizerKind
from shardwright.schedule.registry import Kind

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]

NONE, SELECTIVE, FULL = range(len(RECOMPUTE))
"""Values of `Candidates.recompute`."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """The training job: model, cluster, batch and software stack.

    `seq_len` in tokens, `global_batch` in sequences. `precision`: of the matmuls, a name in `formats.FORMATS`; with all
    except fp32 the master weights are fp32. `calibration`: the fitted constants of step times. `optimizer`: a name in
    `optimizers.OPTIMIZERS`; `narrow_states`: its states are stored in bf16; `optimizer_options`: (name, value) of each
    option that is not at its default. `document_tokens`: with attention within documents, the mean length of a token's
    document, which is sum L^2 / sum L over documents of L tokens (`data.samples`); None: attention is over
    sequences. `expert_load`: the loads of experts; None: they are even. `averages`: copies of the weights that an
    average of them keeps, in the memory of the device or, with `averages_on_host`, of the host. `pairs`: the loss is of
    pairs of answers, and is not chunked; `reference_sequences`: sequences that the reference scores
    before the first step.
    """

    model: ModelSpec
    cluster: Cluster
    seq_len: int
    global_batch: int
    precision: str = "bf16"
    stack: Stack = SHARDWRIGHT
    calibration: Calibration = CALIBRATED
    optimizer: str = "adamw"
    narrow_states: bool = False
    optimizer_options: tuple[tuple[str, float], ...] = ()
    document_tokens: float | None = None
    expert_load: UnevenLoad | None = None
    averages: int = 0
    averages_on_host: bool = False
    pairs: bool = False
    reference_sequences: int = 0

    @property
    def attended(self) -> tuple[str, float]:
        """Return the tokens that attention spans (the causal mask leaves half), and their symbol in formulas."""
        return ("s", self.seq_len) if self.document_tokens is None else ("document_tokens", self.document_tokens)

    @property
    def mean_attended(self) -> tuple[str, float]:
        """Return `attended` on average over layers with and without windows, and linear layers."""
        symbol, tokens = self.attended
        differs = self.model.window or self.model.linear_attention
        return ("attended_tokens", self.model.mean_attended(tokens)) if differs else (symbol, tokens)

    def busiest_load(self, ep: Ints, *, placed: bool) -> Floats:
        """Return the load of the busiest rank of ep, (n,), as a multiple of the mean load. `placed`: experts are placed
        on ranks by their load."""
        if self.expert_load is None or self.model.moe is None:
            return np.ones(len(ep))
        return self.expert_load.busiest(self.model.moe, ep, placed=placed)

    @property
    def optimizer_kind(self) -> OptimizerKind:
        """Return the row of the optimizer."""
        return OPTIMIZERS[self.optimizer]

    @property
    def options_of_optimizer(self) -> dict[str, float]:
        """Return the values of all options of the optimizer, by name."""
        return self.optimizer_kind.option_values(dict(self.optimizer_options))

    @property
    def n_optimizer_states(self) -> int:
        """Return the optimizer states of a parameter: 2 for Adam. Matrices may differ (`n_matrix_states`)."""
        return len(self.optimizer_kind.state)

    @property
    def n_matrix_states(self) -> int:
        """Return the optimizer states of an element of a hidden matrix: 1 for Muon."""
        of_matrices = self.optimizer_kind.matrix_state
        return self.n_optimizer_states if of_matrices is None else len(of_matrices)

    @property
    def state_bytes(self) -> float:
        """Return the bytes of an element of one optimizer state; in blocks including its share of a scale."""
        if self.optimizer_kind.in_blocks:
            return 1 + self.stack.state_bytes / self.options_of_optimizer["block_size"]
        return 2.0 if self.narrow_states else self.stack.state_bytes

    def offload_problems(self, where: str, parameters: str = "none", activations: str = "none") -> Iterator[str]:
        """Yield the reasons why optimizer states cannot be stored as `layout.offload_optimizer` says, or why the cost
        is unknown; `parameters`, `activations`: `layout.offload_parameters`, `layout.offload_activations`."""
        yield from self.optimizer_kind.offload_problems(where)
        chip = self.cluster.accelerator
        if where == "disk" and not chip.disk_bytes_per_s:
            yield (
                f"layout.offload_optimizer='disk': there is no price for it, accelerators.{chip.name} has no "
                f"disk_gb_per_s; say it in a hardware file"
            )
        if activations == "cpu" and not chip.host_bytes_per_s:
            yield (
                f"layout.offload_activations='cpu': there is no price for it, accelerators.{chip.name} has no "
                f"host_gb_per_s, the link to a memory of the host that is not its own; say it in a hardware file"
            )
        missing = [name for name in ("host", "host_memory") if not getattr(chip, f"{name}_bytes_per_s")]
        if "cpu" in (where, parameters) and missing:
            name = "optimizer" if where == "cpu" else "parameters"
            yield (
                f"layout.offload_{name}='cpu': there is no price for it, accelerators.{chip.name} has no "
                f"{' and no '.join(f'{name}_gb_per_s' for name in missing)}, the link to a memory of the host that is "
                f"not its own and how fast an update is there; say them in a hardware file"
            )

    def scores_in_memory(self, candidates: "Candidates", window: int) -> Ints:
        """Return 1 for each candidate that computes the scores of attention in a layer with a `window` (0: none) in
        memory, some rows at a time, and 0 for each that has them in a kernel."""
        model = self.model
        if self.stack.scores_in_kernel:
            return np.zeros_like(candidates.cp)
        rings, places = np.unique(candidates.cp_ring, return_inverse=True)
        refused = [
            scores_in_rows(
                **self._attention_kernel,
                softcap=model.attention_softcap > 0,
                sinks=model.attention_sinks,
                windows=window > 0,
                cp=int(ring),
            )
            for ring in rings
        ]
        return np.array([reason is not None for reason in refused], dtype=np.int64)[places]

    def has_rule(self, window: int) -> bool:
        """Return whether a layer with a `window` has a window, sinks or a soft cap, unlike plain causal attention."""
        return window > 0 or self.model.attention_sinks or self.model.attention_softcap > 0

    def keeps_all_heads(self, candidates: "Candidates", window: int) -> Ints:
        """Return 1 for each candidate that repeats keys and values for all query heads in a layer with a `window`, and
        keeps them so until the backward pass, else 0."""
        if not self.stack.expands_heads or self.has_rule(window) or not needs_equal_heads(**self._attention_kernel):
            return np.zeros_like(candidates.cp)
        return (candidates.cp_ring == 1) * (1 - self.scores_in_memory(candidates, window))

    @property
    def _attention_kernel(self) -> dict[str, Any]:
        """Return the properties by which a run chooses a kernel of attention (`model.pieces`)."""
        gpu = not self.cluster.accelerator.is_cpu
        return {"gpu": gpu, "element_bytes": self.element_bytes, "width": self.model.qk_dim}

    @property
    def tokens(self) -> int:
        """Return the tokens of a step, over all ranks."""
        return self.seq_len * self.global_batch

    @property
    def wide_precision(self) -> str:
        """Return the precision of matmuls that never have fewer than 16 bits: attention and the logits."""
        return FORMATS[self.precision].wide or self.precision

    @property
    def compiled(self) -> bool:
        """Return whether the run is a run of this system with `precision.compile`."""
        return self.stack.name == SHARDWRIGHT_COMPILED.name

    @property
    def widens_norms(self) -> bool:
        """Return whether eager norms of the residual stream keep their input as a copy in fp32."""
        return self.stack.widens_norms and self.model.norm_offset and self.element_bytes < 4

    @property
    def widens_layer_norms(self) -> bool:
        """Return whether the norms of layers do so; a compiled block casts its input again in the backward pass."""
        return self.widens_norms and not self.compiled

    @property
    def peak_flops_per_s(self) -> float:
        """Return the peak of an accelerator in the format of the matmuls, in FLOP/s."""
        return self.cluster.accelerator.flops_per_s[FORMATS[self.precision].peak]

    @property
    def element_bytes(self) -> int:
        """Return the bytes of an element of an activation or a working weight; fp8 is used only inside matmuls."""
        return 4 if self.precision in ("fp32", "tf32") else 2


@dataclass(frozen=True, kw_only=True)
class Candidates:
    """n layouts, each with a micro-batch. Keys of the layout that may differ between candidates are arrays of shape
    (n,); `shared` has the values of all other keys (its values of keys with arrays are not used).

    The fields have the meaning of the fields of `Layout`. The world size need not be the same for all.
    """

    shared: Layout
    dp_replicate: Ints
    dp_shard: Ints
    cp: Ints
    tp: Ints
    ep: Ints
    zero: Ints
    sequence_parallel: NDArray[np.bool_]
    micro_batch: Ints
    recompute: Ints

    @staticmethod
    def from_layout(layout: Layout, micro_batch: int, recompute: str | None = None) -> "Candidates":
        """Return one layout as arrays of length 1. `recompute`, if given, replaces the layout's."""
        own = {name: getattr(layout, name) for name in COLUMNS if name in KEYS}
        own |= {"micro_batch": micro_batch, "recompute": RECOMPUTE.index(recompute or layout.recompute)}
        return Candidates(shared=layout, **{name: np.array([value]) for name, value in own.items()})

    def __len__(self) -> int:
        return len(self.tp)

    def take(self, rows: Ints | NDArray[np.bool_] | slice) -> "Candidates":
        """Return a subset of the candidates, by indices or by a mask."""
        return replace(self, **{name: getattr(self, name)[rows] for name in COLUMNS})

    @property
    def pp(self) -> int:
        """Return the number of ranks of the pipeline."""
        return self.shared.pp

    @cached_property
    def cp_ring(self) -> Ints:
        """Return the number of ranks of cp that pass keys and values to each other; as `Layout.cp_ring`."""
        ring: Ints = self.cp // self.shared.ulysses_of(self.cp)
        return ring

    @property
    def kind(self) -> Kind:
        """Return the registered row of the schedule."""
        return self.shared.kind

    @cached_property
    def data_ranks(self) -> Ints:
        """Return the number of data ranks, over which the global batch is partitioned."""
        return self.dp_replicate * self.dp_shard

    @cached_property
    def shards(self) -> Ints:
        """Return the number of ranks over which ZeRO shards a dense parameter: dp_shard x cp."""
        return self.dp_shard * self.cp

    @cached_property
    def gradient_ranks(self) -> Ints:
        """Return the number of ranks over which the gradient of a dense parameter is reduced: data ranks x cp."""
        return self.data_ranks * self.cp

    @cached_property
    def expert_shards(self) -> Ints:
        """Return the number of ranks over which ZeRO shards an expert: dp_shard x cp x tp / ep.

        Other systems also partition experts over dp_replicate, so that ep is larger than dp_shard x cp x tp; then 1.
        """
        return np.maximum(self.dp_shard * self.cp * self.tp // self.ep, 1)

    @cached_property
    def world(self) -> Ints:
        """Return the world size."""
        return self.pp * self.dp_replicate * self.dp_shard * self.cp * self.tp

    def __getattr__(self, name: str) -> Any:
        """Return the value of a layout key that all candidates share."""
        if name in KEYS:
            return getattr(self.shared, name)
        raise AttributeError(f"Candidates have no {name!r}")

    @property
    def recomputes(self) -> NDArray[np.bool_]:
        """Return whether the backward pass computes anything again; as `Layout.recomputes`."""
        return self.recompute > 0

    @property
    def recomputes_parts(self) -> NDArray[np.bool_]:
        """Return whether the backward pass computes some parts of a block again."""
        return self.recompute == RECOMPUTE.index("selective")

    @cached_property
    def token_shards(self) -> Ints:
        """Return the number of token shards between a block's matmuls: tp with sequence parallelism, else 1."""
        return np.where(self.sequence_parallel, self.tp, 1)

    def tokens(self, seq_len: int) -> Floats:
        """Return the tokens of a micro-batch on one rank of cp."""
        return self.micro_batch * seq_len / self.cp

    @property
    def alternates(self) -> bool:
        """Return whether a rank can run passes of two micro-batches at once: without a pipeline, or with several stages
        on a rank. Ignored: a step of one micro-batch."""
        return self.pp == 1 or self.shared.n_stages * len(self.shared.ways) > self.pp

    def microbatches(self, global_batch: int) -> Ints:
        """Return the micro-batches of a data rank in one step; the global batch has to be divisible."""
        return global_batch // (self.micro_batch * self.data_ranks)


COLUMNS = tuple(field.name for field in fields(Candidates) if field.name != "shared")
"""The array fields of `Candidates`."""
