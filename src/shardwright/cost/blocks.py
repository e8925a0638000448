"""Counts derived from the rows of a layer (`model.modules`): norms, branches, matmuls, collectives over tp.

Layers with the same rows are one `BlockShape`; a decoder has one kind, or two if only some of its layers have experts.
A module of multi-token prediction is a kind of its own.
"""

from collections import Counter
from dataclasses import dataclass, replace
from functools import cache, cached_property

from shardwright.model.lora_sizes import StoredRow
from shardwright.model.modules import MTP_BLOCK, layer_rows
from shardwright.model.row import Row, Split
from shardwright.model.spec import ModelSpec


@dataclass(frozen=True)
class FusedRows:
    """Rows that are one fused matmul: column-parallel rows that read the same tensor. Other rows are groups of one."""

    rows: tuple[Row, ...]

    @property
    def name(self) -> str:
        """Return the name, such as `attention q k v`."""
        names = [row.name.removesuffix(".weight").rpartition(".")[::2] for row in self.rows]
        by_path: dict[str, list[str]] = {}
        for path, last in names:
            by_path.setdefault(path, []).append(last)
        return ", ".join(" ".join([path.replace(".", " "), *last]).strip() for path, last in by_path.items())


@dataclass(frozen=True)
class Region:
    """A tensor-parallel part of a layer, from column-parallel matmuls to the row-parallel matmul whose output is summed
    over tp. `inputs`: features a token of each input that no earlier region has gathered. `readers`: the number of
    column-parallel matrices that read each of these inputs. `every_head`: features of each output of a replicated
    matmul that the heads of all ranks read."""

    name: str
    inputs: tuple[int, ...]
    readers: tuple[int, ...]
    every_head: tuple[int, ...]


@dataclass(frozen=True)
class BlockShape:
    """A layer of one kind. `rows`: its parameters, with the matrices of adapters. `d_model`: width of the residual
    stream. `window`: of its attention; 0: none. `chunked`: the window is a chunk. `norms_heads`: its queries and keys
    have norms, possibly without weights."""

    rows: tuple[Row, ...]
    d_model: int
    window: int = 0
    chunked: bool = False
    norms_heads: bool = False

    @property
    def name(self) -> str:
        """Return the name of a layer of this kind in the ledger."""
        what = "an MTP module" if any(row.name.startswith(MTP_BLOCK) for row in self.rows) else "a layer"
        bare = self.norms_heads and not any(row.module.endswith("attention.q_norm") for row in self.rows)
        parts = (
            ("experts", self.experts),
            ("a window", self.window and not self.chunked),
            ("chunks", self.chunked),
            ("norms without weight", bare),
            ("linear attention", self.linear),
        )
        with_parts = [part for part, has in parts if has]
        return f"{what} with {' and '.join(with_parts)}" if with_parts else what

    @cached_property
    def base(self) -> tuple[Row, ...]:
        """Return the parameters that are not of adapters."""
        return tuple(row for row in self.rows if not row.adapter)

    @cached_property
    def adapters(self) -> tuple[Row, ...]:
        """Return the matrices of adapters."""
        return tuple(row for row in self.rows if row.adapter)

    @cached_property
    def scaled(self) -> tuple[Row, ...]:
        """Return the magnitudes of adapters with DoRA."""
        return tuple(row for row in self.rows if row.adapter == "m")

    @cached_property
    def scaled_matrices(self) -> tuple[Row, ...]:
        """Return the matrices whose outputs DoRA scales."""
        modules = {row.module for row in self.scaled}
        return tuple(row for row in self.base if row.hidden and row.module in modules)

    @cached_property
    def trained(self) -> "BlockShape":
        """Return the same layer without its frozen parameters, to count the parameters that have gradients."""
        return replace(self, rows=tuple(row for row in self.rows if not row.frozen))

    @cache  # noqa: B019 (blocks are few, and equal ones share an entry)
    def stored(self, element_bytes: int) -> "BlockShape":
        """Return the same layer with the rows of quantised matrices as elements of `element_bytes` that take as many
        bytes. Ignored: bytes by which shards over tp are larger."""
        return replace(
            self,
            rows=tuple(
                replace(row, shape=(*row.shape[:-1], -(-StoredRow(row.stored, row.shape[-1]).n_bytes // element_bytes)))
                if row.stored
                else row
                for row in self.rows
            ),
        )

    @property
    def frozen(self) -> bool:
        """Return whether only adapters are trained."""
        return any(row.frozen for row in self.rows)

    @cached_property
    def matmuls(self) -> tuple[FusedRows, ...]:
        """Return the matmuls, in the order of the forward pass."""
        groups: dict[tuple[str, ...], list[Row]] = {}
        for row in self.rows:
            if row.matmul:
                fused = row.split in ("column", "kv_column", "experts") and row.adapter != "a"
                groups.setdefault((row.input,) if fused else (row.input, row.name), []).append(row)
        return tuple(FusedRows(tuple(rows)) for rows in groups.values())

    @cached_property
    def linear(self) -> bool:
        """Whether its attention is linear."""
        return any(row.module.endswith("attention.qkvz") for row in self.base)

    @property
    def gates_shared(self) -> bool:
        """Whether a gate multiplies the output of shared experts."""
        return any(row.module.endswith("shared_gate") for row in self.base)

    @property
    def tensors(self) -> int:
        """Return the number of parameter tensors, if rows that read one tensor are one."""
        return len(self.matmuls) + self.norms

    @cached_property
    def regions(self) -> tuple[Region, ...]:
        """Return the tensor-parallel regions, in the order of the forward pass."""
        result: list[Region] = []
        readers = Counter(row.input for row in self.base if row.split in ("column", "kv_column") and row.matmul)
        seen: set[str] = set()
        inputs: list[tuple[int, int]] = []
        every_head: list[int] = []
        for row in self.base:
            if row.every_head:
                every_head.append(row.every_head)
            if row.split in ("column", "kv_column") and row.matmul and row.input not in seen:
                seen.add(row.input)
                inputs.append((row.shape[-1], readers[row.input]))
            elif row.split == "row" and row.matmul:
                features, counts = (tuple(pair[at] for pair in inputs) for at in (0, 1))
                result.append(Region(_path(row) or row.module, features, counts, tuple(every_head)))
                inputs, every_head = [], []
        return tuple(result)

    @cached_property
    def experts(self) -> tuple[Row, ...]:
        """Return the matrices of experts."""
        return tuple(row for row in self.base if row.kind == "expert")

    @cached_property
    def norms(self) -> int:
        """Return the number of norms of the residual stream."""
        return sum(row.kind == "norm" and row.shape == (self.d_model,) and row.split_dim is None for row in self.base)

    @cached_property
    def norms_after(self) -> bool:
        """Return whether the outputs of branches have norms."""
        return any(row.module.endswith("_post_norm") for row in self.base)

    @cached_property
    def sharded_norms(self) -> tuple[str, ...]:
        """Return the names of the norms over features that are sharded over tp, for example `attention q norm`."""
        sharded = [row for row in self.base if row.kind == "norm" and row.split_dim is not None]
        return tuple(row.module.replace(".", " ").replace("_", " ") for row in sharded)

    @cached_property
    def branches(self) -> int:
        """Return the number of outputs added to the residual stream; experts with shared experts count once."""
        added = (row.name.removeprefix(MTP_BLOCK) for row in self.base if row.split in ("row", "experts"))
        return len({name.partition(".")[0] for name in added})

    @cached_property
    def inputs(self) -> int:
        """Return the number of tensors of width d_model that matmuls of all tokens with a trained matrix read; each is
        kept once. A tensor of twice that width (of the projection of multi-token prediction) counts as two."""
        return sum(self._input_widths.values())

    @cached_property
    def normed_inputs(self) -> int:
        """Return the number of `inputs` that are outputs of norms, and not the residual stream itself."""
        return sum(n for name, n in self._input_widths.items() if not name.endswith("_residual"))

    @cached_property
    def _input_widths(self) -> dict[str, int]:
        """Return for each input of matmuls its width as a multiple of d_model, if it is one."""
        widths = {row.input: row.shape[-1] for row in self._read if row.split != "row"}
        return {name: width // self.d_model for name, width in widths.items() if width % self.d_model == 0}

    @cached_property
    def _read(self) -> list[Row]:
        """Return the trained matrices of all tokens that read a tensor of the layer itself; with adapters only A."""
        return [row for row in self.rows if row.matmul == "all" and row.trained and row.adapter != "b"]

    @cached_property
    def networks(self) -> dict[Row, tuple[Row, ...]]:
        """Return, for the last matrix of each network of all tokens, the matrices that compute its inner features: gate
        and up, or up."""
        lasts = [row for row in self._dense if row.split == "row" and row.input != "attention"]
        inputs = [row for row in self._dense if row.split == "column"]
        return {
            last: tuple(row for row in inputs if row.shape[-2] == last.shape[-1] and _path(row) == _path(last))
            for last in lasts
        }

    @cached_property
    def gated(self) -> bool:
        """Return whether networks are gated: two matrices in, one out."""
        into_experts = sum(row.input == self.experts[0].input for row in self.experts)
        return max([into_experts, *map(len, self.networks.values())]) > 1

    @cached_property
    def inner(self) -> int:
        """Return the inner features of the networks of all tokens."""
        return sum(last.shape[-1] for last in self.networks)

    @cached_property
    def inner_read(self) -> int:
        """Return the inner features of the networks of all tokens that a trained matrix reads."""
        read = {row.input for row in self._read}
        return sum(last.shape[-1] for last in self.networks if last.input in read)

    @cached_property
    def expert_inner(self) -> int:
        """Return the inner features of an expert, 0 without experts."""
        return self.experts[-1].shape[-1] if self.experts else 0

    @cached_property
    def dense_numel(self) -> dict[Split, int]:
        """Return the elements of the layer's parameters without experts, by their split over tp."""
        by_split: Counter[Split] = Counter()
        for row in self.rows:
            if row.counted and row.split != "experts":
                by_split[row.split] += row.numel
        return dict(by_split)

    @cached_property
    def hidden_numel(self) -> dict[Split, int]:
        """Return the elements of hidden matrices, by their split over tp."""
        by_split: Counter[Split] = Counter()
        for row in self.rows:
            if row.hidden and row.split != "experts":
                by_split[row.split] += row.numel
        return dict(by_split)

    @property
    def reads_rows(self) -> bool:
        """Return whether a trained matrix reads the rows that are sent to experts."""
        return any(row.trained and row.input == self.experts[0].input for row in self._expert_rows)

    @property
    def reads_expert_inner(self) -> bool:
        """Return whether a trained matrix reads the inner features of experts."""
        return any(row.trained and row.input == self.experts[-1].input for row in self._expert_rows)

    @property
    def _expert_rows(self) -> list[Row]:
        return [row for row in self.rows if row.matmul == "routed"]

    @cached_property
    def expert_numel(self) -> int:
        """Return the elements of all experts, with their biases."""
        return sum(row.numel for row in self.rows if row.split == "experts")

    @cached_property
    def network_numel(self) -> int:
        """Return the elements of the largest fused matrix of the networks of all tokens: gate and up."""
        return max((sum(row.numel for row in rows) for rows in self.networks.values()), default=0)

    @cached_property
    def expert_matmul_numel(self) -> int:
        """Return the elements of the largest fused matrix of all experts together."""
        of_experts = [group.rows for group in self.matmuls if group.rows[0].split == "experts"]
        return max((sum(row.numel for row in rows) for rows in of_experts), default=0)

    @property
    def _dense(self) -> list[Row]:
        return [row for row in self.base if row.matmul == "all"]


def _path(row: Row) -> str:
    return row.module.rpartition(".")[0]


@cache
def blocks(spec: ModelSpec) -> dict[BlockShape, tuple[int, ...]]:
    """Return the kinds of layers, each with the numbers of its layers, in the order of their first layers."""
    layers: dict[BlockShape, tuple[int, ...]] = {}
    for layer in range(spec.n_blocks):
        norms_heads = spec.norms_heads(layer) and not spec.is_linear(layer)
        window, chunked = spec.layer_window(layer), spec.is_chunked(layer)
        block = BlockShape(layer_rows(spec, layer), spec.d_model, window, chunked, norms_heads)
        layers[block] = (*layers.get(block, ()), layer)
    return layers
