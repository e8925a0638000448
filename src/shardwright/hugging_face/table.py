"""Which tensor of a file holds which rows of which parameter: from an architecture's table and the rows of the model.

No torch. A tensor of a file is a stack of parameters of ours along the output dim, often of one; a parameter of ours
lies in one tensor, or with experts in one for each.
"""

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from shardwright.errors import ConfigError
from shardwright.hugging_face.architecture import Architecture, Stored, Table
from shardwright.model.modules import MTP_BLOCK, Row, end_rows, layer_rows
from shardwright.model.spec import ModelSpec


@dataclass(frozen=True)
class Part:
    """A parameter of ours in a tensor of a file: its name, which expert of it (None: no experts), how many rows."""

    name: str
    expert: int | None
    n_rows: int


@dataclass(frozen=True)
class FileTensor:
    """One tensor of a file.

    `parts`: what is stacked in it along the output dim, in order. `shape`: as in the file. `transposed`: (in, out).
    `order`: of an interleaved tensor, for each of our rows its row in the file. `copy`: another tensor has the same
    values; it is written, and never read.
    """

    name: str
    parts: tuple[Part, ...]
    shape: tuple[int, ...]
    transposed: bool = False
    order: tuple[int, ...] | None = None
    copy: bool = False

    def first_row(self, part: Part) -> int:
        """Where a part begins along the output dim."""
        return sum(each.n_rows for each in self.parts[: self.parts.index(part)])


def file_tensors(architecture: Architecture, spec: ModelSpec) -> list[FileTensor]:
    """Every tensor that the files of a model have, sorted by name. Raises ConfigError for a parameter without one."""
    ends = {row.name: row for row in end_rows(spec)}
    found = list(_tensors(architecture.ends, ends, "", architecture.prefix))
    of_layer = {**architecture.layer, **architecture.also(spec)}
    of_module = {**architecture.module, **{_in_module(name): stored for name, stored in of_layer.items()}}
    for layer in range(spec.n_blocks if architecture.module else spec.n_layers):
        is_module = layer >= spec.n_layers
        prefix = architecture.prefix + architecture.layers.format(layer=layer)
        rows = {row.name: row for row in layer_rows(spec, layer)}
        found += _tensors(of_module if is_module else of_layer, rows, f"layers.{layer}.", prefix)
        for name, stored in architecture.copied.items() if is_module else ():
            source = ends.get(f"{name}.weight", ends["embedding.weight"])  # a tied head is the embedding's matrix
            found.append(replace(_tensor(stored, [source], "", prefix, ".weight"), copy=True))
    return sorted(found, key=lambda tensor: tensor.name)


def _in_module(name: str | tuple[str, ...]) -> str | tuple[str, ...]:
    """A key of the table of a layer for the block of a module of multi-token prediction."""
    return MTP_BLOCK + name if isinstance(name, str) else tuple(MTP_BLOCK + each for each in name)


def _tensors(table: Table, rows: dict[str, Row], ours: str, theirs: str) -> Iterator[FileTensor]:
    """The tensors of a layer, or of what is outside of the layers; `ours` and `theirs` begin the global names."""
    stacked = {name: group for group in table if isinstance(group, tuple) for name in group}
    for row in rows.values():
        if not row.counted:
            continue  # the load of the last step is a state of training, no weight
        module, _, kind = row.name.rpartition(".")
        if module in stacked:
            group = stacked[module]
            if module == group[0]:
                yield _tensor(table[group], [rows[f"{name}.{kind}"] for name in group], ours, theirs, f".{kind}")
        elif row.name in table:
            yield from _of_parameter(table[row.name], row, ours, theirs)
        elif module in table:
            # The head has no prefix: it is not a part of the body that `prefix` names.
            yield _tensor(table[module], [row], ours, "" if row.kind == "head" else theirs, f".{kind}")
        else:
            raise ConfigError(f"{ours}{row.name} has no tensor in this architecture")


def _of_parameter(stored: str | Stored, row: Row, ours: str, theirs: str) -> Iterator[FileTensor]:
    if row.kind != "expert":
        yield _tensor(stored, [row], ours, theirs, "")
        return
    assert isinstance(stored, str)
    n_experts, n_out, n_in = row.shape
    for expert in range(n_experts):
        part = Part(ours + row.name, expert, n_out)
        yield FileTensor(theirs + stored.format(expert=expert), (part,), (n_out, n_in))


def _tensor(stored: str | Stored, rows: list[Row], ours: str, theirs: str, suffix: str) -> FileTensor:
    stored = Stored(stored) if isinstance(stored, str) else stored
    parts = tuple(Part(ours + row.name, None, row.shape[0]) for row in rows)
    shape = (sum(part.n_rows for part in parts), *rows[0].shape[1:])
    order = tuple(_interleaved(rows[0])) if stored.interleaved else None
    if stored.transposed:
        shape = shape[::-1]
    return FileTensor(theirs + stored.name + suffix, parts, shape, stored.transposed, order)


def _interleaved(row: Row) -> Iterator[int]:
    """For each row of a matrix its row where rotated elements are paired 2i with 2i + 1.

    Element i of the first half of a rotated part is 2i there, element i of the second half 2i + 1.
    """
    begin = 0
    for _ in range(row.heads):
        for name, n_rows in row.parts:
            for i in range(n_rows):
                half = n_rows // 2
                yield begin + (2 * (i % half) + i // half if name.endswith("_rope") else i)
            begin += n_rows


def reasons_to_ignore(architecture: Architecture, spec: ModelSpec, names: Iterable[str]) -> dict[str, str | None]:
    """Why each tensor of a file that the model has no parameter for is left out; None if nothing says so."""
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
