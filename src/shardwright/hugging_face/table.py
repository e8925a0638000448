"""Maps parameters to tensors of files, from an architecture's table and the rows of the model; no torch.

A tensor of a file is a stack of our parameters along the output dim, often of one. A parameter is in one tensor or, if
it is of experts, in one for each or in one for all experts.
"""

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from shardwright.hugging_face.architecture import Architecture, Stored, Table
from shardwright.model.modules import MTP_BLOCK, end_rows, layer_rows
from shardwright.model.row import Row
from shardwright.model.spec import ModelSpec
from shardwright.system.errors import ConfigError


@dataclass(frozen=True)
class ParameterPart:
    """One of our parameters in a tensor of a file: name, number of the expert (None: no experts), number of rows."""

    name: str
    expert: int | None
    n_rows: int


@dataclass(frozen=True)
class FileTensor:
    """One tensor of a file.

    `parts`: the parameters stacked in it along the output dim, in order. `shape`: as in the file. `transposed`: (in,
    out). `order`: for a tensor with another order of rows, for each of our rows its row in the file. `copy`: another
    tensor has the same values; this one is written, and never read. `stacks_experts`: the first dim is the expert.
    `folded`: the file has a vector over all heads as (heads, head_dim).
    """

    name: str
    parts: tuple[ParameterPart, ...]
    shape: tuple[int, ...]
    transposed: bool = False
    order: tuple[int, ...] | None = None
    copy: bool = False
    stacks_experts: bool = False
    folded: bool = False

    @property
    def out_dim(self) -> int:
        """Return the output dim of the parameters, along which they are stacked."""
        return int(self.stacks_experts)

    def first_row(self, part: ParameterPart) -> int:
        """Return the first row of a part along the output dim."""
        return sum(earlier.n_rows for earlier in self.parts[: self.parts.index(part)])


def file_tensors(architecture: Architecture, spec: ModelSpec) -> list[FileTensor]:
    """Return every tensor of a model's files, sorted by name. Raises ConfigError for a parameter without one."""
    ends = {row.name: row for row in end_rows(spec)}
    tensors = list(_tensors(spec, architecture.ends, ends, "", architecture.prefix))
    of_layer = {**architecture.layer, **architecture.also(spec)}
    of_module = {**architecture.module, **{_in_module(name): stored for name, stored in of_layer.items()}}
    for layer in range(spec.n_blocks if architecture.module else spec.n_layers):
        is_module = layer >= spec.n_layers
        prefix = architecture.prefix + architecture.layers.format(layer=layer)
        rows = {row.name: row for row in layer_rows(spec, layer)}
        tensors += _tensors(spec, of_module if is_module else of_layer, rows, f"layers.{layer}.", prefix)
        for name, stored in architecture.copied.items() if is_module else ():
            source = ends.get(f"{name}.weight", ends["embedding.weight"])  # a tied head is the embedding's matrix
            tensors.append(replace(_tensor(spec, stored, [source], "", prefix, ".weight"), copy=True))
    return sorted(tensors, key=lambda tensor: tensor.name)


def _in_module(name: str | tuple[str, ...]) -> str | tuple[str, ...]:
    """Return a key of a layer's table for the block of a multi-token prediction module."""
    return MTP_BLOCK + name if isinstance(name, str) else tuple(MTP_BLOCK + part for part in name)


def _tensors(spec: ModelSpec, table: Table, rows: dict[str, Row], ours: str, theirs: str) -> Iterator[FileTensor]:
    """Yield the tensors of a layer, or outside of the layers; `ours` and `theirs` are prefixes of the global names."""
    stacked = {name: group for group in table if isinstance(group, tuple) for name in group}
    for row in rows.values():
        if not row.counted:
            continue  # the load of the last step is a training state, not a weight
        module, _, kind = row.name.rpartition(".")
        if row.name in stacked:
            group = stacked[row.name]
            if row.name == group[0]:
                yield _tensor(spec, table[group], [rows[name] for name in group], ours, theirs, "")
        elif module in stacked:
            group = stacked[module]
            if module == group[0]:
                yield _tensor(spec, table[group], [rows[f"{name}.{kind}"] for name in group], ours, theirs, f".{kind}")
        elif row.name in table:
            yield from _parameter_tensors(spec, table[row.name], row, ours, theirs)
        elif module in table:
            # The head has no prefix: it is not a part of the body that `prefix` names.
            yield _tensor(spec, table[module], [row], ours, "" if row.kind == "head" else theirs, f".{kind}")
        else:
            raise ConfigError(f"{ours}{row.name} has no tensor in this architecture")


def _parameter_tensors(spec: ModelSpec, stored: str | Stored, row: Row, ours: str, theirs: str) -> Iterator[FileTensor]:
    if isinstance(stored, Stored) or "{expert}" not in stored:
        yield _tensor(spec, stored, [row], ours, theirs, "")
        return
    n_experts, n_out, n_in = row.shape
    for expert in range(n_experts):
        part = ParameterPart(ours + row.name, expert, n_out)
        yield FileTensor(theirs + stored.format(expert=expert), (part,), (n_out, n_in))


def _tensor(spec: ModelSpec, stored: str | Stored, rows: list[Row], ours: str, theirs: str, suffix: str) -> FileTensor:
    stored = Stored(stored) if isinstance(stored, str) else stored
    assert not stored.interleaved or len(rows) == 1, f"{stored.name}: interleaved parameters are not stacked"
    of_experts = rows[0].split == "experts"
    lead, (n_out, *n_in) = rows[0].shape[:of_experts], rows[0].shape[of_experts:]
    parts = tuple(ParameterPart(ours + row.name, None, row.shape[len(lead)]) for row in rows)
    transposed = stored.transposed and len(n_in) > 0
    last = [sum(part.n_rows for part in parts), *n_in]
    order = tuple(_interleaved(spec, rows[0])) if stored.interleaved else None
    if stored.alternating:
        order = tuple(len(parts) * row + part for part in range(len(parts)) for row in range(n_out))
    if stored.by_kv_head:
        order = tuple(_by_kv_head(spec))
    shape = (*lead, *(last[::-1] if transposed else last))
    if stored.folded:
        shape = (n_out // spec.head_dim, spec.head_dim)
    name = theirs + stored.name + suffix
    return FileTensor(name, parts, shape, transposed, order, stacks_experts=of_experts, folded=stored.folded)


def _by_kv_head(spec: ModelSpec) -> Iterator[int]:
    """Yield for each row of stacked queries, keys and values the row in a file that has them by kv head."""
    n_queries, c = spec.n_heads // spec.n_kv_heads, spec.head_dim
    places = [(kv, query) for kv in range(spec.n_kv_heads) for query in range(n_queries)]
    places += [(kv, n_queries) for kv in range(spec.n_kv_heads)]
    places += [(kv, n_queries + 1) for kv in range(spec.n_kv_heads)]
    for kv, place in places:
        begin = (kv * (n_queries + 2) + place) * c
        yield from range(begin, begin + c)


def _interleaved(spec: ModelSpec, row: Row) -> Iterator[int]:
    """Yield for each row of a matrix, or element of its bias, the row in a file whose rotated elements are paired 2i
    with 2i + 1.

    Element i of the first half of a rotated part is 2i there, element i of the second half 2i + 1.
    """
    parts, heads = row.parts, row.heads
    if spec.latent_attention is None:  # the first elements of each head are rotated
        parts = (("head_rope", spec.rope_dim), ("head", spec.head_dim - spec.rope_dim))
        heads = row.shape[0] // spec.head_dim
    begin = 0
    for _ in range(heads):
        for name, n_rows in parts:
            for i in range(n_rows):
                half = n_rows // 2
                yield begin + (2 * (i % half) + i // half if name.endswith("_rope") else i)
            begin += n_rows


def reasons_to_ignore(architecture: Architecture, spec: ModelSpec, names: Iterable[str]) -> dict[str, str | None]:
    """Return, for each tensor of a file without a parameter of the model, why it is left out; None if unknown."""
    copies = {tensor.name for tensor in file_tensors(architecture, spec) if tensor.copy}
    patterns = [
        (re.compile(pattern.replace("{n_layers}", str(spec.n_layers))), why)
        for pattern, why in architecture.ignored.items()
    ]
    reasons: dict[str, str | None] = {}
    for name in names:
        if spec.tied_embedding and name == f"{architecture.ends['head']}.weight":
            reasons[name] = "the head is the embedding's matrix"
        elif name in copies:
            reasons[name] = "modules of multi-token prediction share the embedding and the head of the model"
        else:
            reasons[name] = next((why for pattern, why in patterns if pattern.fullmatch(name)), None)
    return reasons
