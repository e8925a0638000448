"""The optimizers for `[optimizer] name`: their options and their state for each parameter. No torch.

`register` adds an optimizer, built-in or a user's. The run file's keys, the optimizer of `train` and `verify`,
checkpoints, and the planner's memory and traffic of the optimizer step read these rows.
"""

import math
import pkgutil
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from shardwright.system import extensions
from shardwright.system.units import MiB

if TYPE_CHECKING:
    from shardwright.model.row import Row


OFFLOAD_CHUNK_BYTES = 8 * MiB
"""Bytes of optimizer states on a disk that are read, updated and written together."""

SLOWEST_BF16_DECAY = 1 - 2.0**-8
"""Largest decay factor that reliably changes a bf16 number. With 8 significant bits, half the distance to the next
number is up to 2^-8 of the number, so a product with a larger factor may be rounded back to it."""

WIDENING_BYTES = 108.0
"""Bytes that PyTorch's operations read and write for an element to widen and round two one-byte states.

For each state: the code (1 + 4), its number (4 + 4) and the number times the scale (8) to widen; the largest value of a
block (4), division by it (8), the code (4 + 4) and its byte (4 + 1) to round. Both states in the update: 16.
"""


@dataclass(frozen=True, kw_only=True)
class Option:
    """A number that one optimizer has: `[optimizer] beta1`. Valid: `least` <= value < `below`. With a boolean default
    only true and false are valid; with an `int` default only integers.

    `decay`: each step multiplies a state by it. `at_test_size`: its largest value for a model that `verify` has
    reduced.
    """

    default: float | bool
    help: str
    least: float = 0.0
    below: float = float("inf")
    decay: bool = False
    at_test_size: float = float("inf")

    @property
    def whole(self) -> bool:
        """Return whether only integers are valid."""
        return isinstance(self.default, int) and not isinstance(self.default, bool)


@dataclass(frozen=True, kw_only=True)
class OptimizerKind:
    """One optimizer.

    Its update of an element depends only on that element (AdamW, Lion, SGD with momentum), with three exceptions:
    `matrix_state`, the state of hidden matrices that are updated as whole matrices (Muon); `means`; and `in_blocks`.

    `options`: its own options, in addition to the common ones.
    `state`: names in the optimizer's `state[parameter]` of tensors with the shape of the parameter, and with its type
    unless the run stores them in bf16. `counters`: names of fp32 scalars. All are zero before the first step.
    `means`: names of the two states that matrices have instead of `state` (Adafactor): a mean over each row, of shape
    (..., rows, 1), and over each column of each logical matrix, (..., logical matrices, columns).
    `in_blocks`: the `state` of a matrix with at least `least_elements` elements (an option) is stored as one-byte
    codes. Another state, NAME_scale, has a number for each block of `block_size` elements (an option) of a row; the
    last block of a row may be shorter (AdamW with 8-bit states).
    `matrix_flops`: (rows, columns) -> FLOPs of the update of a hidden matrix, for the planner.
    `normalised`: whether an element of an update has about the size of lr, whatever the size of its gradient. The rules
    of muP (`model.mup`) hold for such optimizers.
    `step_bytes`: bytes of an element that a step reads and writes in addition to gradient, weight and states, for the
    planner.
    `problems`: option values by name -> broken rules between them, one sentence each.
    `make`: (parameter groups with their weight_decay, lr, option values by name) -> torch.optim.Optimizer, or its
    import path as "module:name". The parameters of one group are on one device mesh. A group also has `hidden`, whether
    its parameters are hidden matrices, and their `rows` (`model.modules.Row`).
    """

    name: str
    help: str
    options: Mapping[str, Option] = field(default_factory=dict)
    state: tuple[str, ...]
    counters: tuple[str, ...] = ()
    means: tuple[str, str] | None = None
    matrix_state: tuple[str, ...] | None = None
    in_blocks: bool = False
    normalised: bool = False
    matrix_flops: Callable[[int, int], float] = lambda rows, columns: 0.0
    step_bytes: float = 0.0
    problems: Callable[[Mapping[str, float]], Iterable[str]] = lambda _: ()
    make: Callable[[list[dict[str, Any]], float, Mapping[str, float]], Any] | str

    @property
    def by_element(self) -> bool:
        """Return whether the update of an element depends only on that element, in every parameter."""
        return self.matrix_state is None and self.means is None and not self.in_blocks

    @property
    def can_offload(self) -> bool:
        """Return whether its states can be on a disk: it has states, and its step can be computed in parts."""
        return self.by_element and bool(self.state)

    def offload_problems(self, where: str) -> Iterable[str]:
        """Return why its states cannot be at the location in `layout.offload_optimizer`."""
        if where != "none" and not self.can_offload:
            why = "it keeps no state of each element" if self.by_element else "it updates whole matrices"
            why = "its states of a block have one scale" if self.in_blocks else why
            able = ", ".join(name for name, kind in OPTIMIZERS.items() if kind.can_offload)
            yield (
                f"layout.offload_optimizer={where!r} with optimizer.name={self.name!r}: {why}, and only states that "
                f"are updated a part at a time can be there; valid: offload_optimizer='none', or one of {able}"
            )

    def narrow_problems(self, options: Mapping[str, float]) -> Iterable[str]:
        """Return why its states cannot be stored in bf16 with these option values."""
        bf16 = "optimizer.state_dtype='bf16'"
        if self.in_blocks:
            yield (
                f"{bf16} with optimizer.name={self.name!r}: its states have 8 bits already; leave it out, or set "
                f"optimizer.name='adamw'"
            )
        elif self.means is not None:
            yield (
                f"{bf16} with optimizer.name={self.name!r}: its states of a matrix are a number a row and one a "
                f"column, and there is nothing to save; leave it out"
            )
        else:
            for key, option in self.options.items():
                if option.decay and options[key] >= SLOWEST_BF16_DECAY:
                    yield (
                        f"optimizer.{key}={options[key]:g} with {bf16}: a state that falls by {1 - options[key]:.2g} "
                        f"of itself a step, not more than 2^-8 = {2.0**-8:.2g}, may be rounded back to its old value, "
                        f"since bf16 has 8 significant bits; valid: {key} below {SLOWEST_BF16_DECAY:.4g}, or "
                        f"state_dtype='parameters'"
                    )

    def has_codes(self, row: "Row", options: Mapping[str, float]) -> bool:
        """Return whether the states of a parameter are codes with a scale for each block."""
        return self.in_blocks and len(row.shape) > 1 and row.numel >= options["least_elements"]

    def shapes(self, row: "Row", options: Mapping[str, float]) -> dict[str, tuple[int, ...]]:
        """Return the shape of each state of a parameter, by name. `options`: option values by name."""
        if self.has_codes(row, options):
            *lead, n_columns = row.shape
            scales = (*lead, n_blocks(n_columns, options["block_size"]))
            return dict.fromkeys(self.state, row.shape) | dict.fromkeys(map(scale_of, self.state), scales)
        if self.means is not None and len(row.shape) > 1:
            of_rows, of_columns = self.means
            *lead, n_rows, n_columns = row.shape
            return {of_rows: (*lead, n_rows, 1), of_columns: (*lead, max(1, len(row.parts)), n_columns)}
        names = self.matrix_state if row.hidden and self.matrix_state is not None else self.state
        return dict.fromkeys(names, row.shape)

    def n_bytes(self, rows: "Iterable[Row]", element_bytes: int, options: Mapping[str, float]) -> int:
        """Return the bytes of the states of all parameters, with `element_bytes` an element except codes."""
        total = 0
        for row in rows:
            if row.trained:
                codes = self.state if self.has_codes(row, options) else ()
                for name, shape in self.shapes(row, options).items():
                    total += math.prod(shape) * (1 if name in codes else element_bytes)
        return total

    def counters_of(self, row: "Row") -> tuple[str, ...]:
        """Return the counters of a parameter."""
        return () if row.hidden and self.matrix_state is not None else self.counters

    def names(self, rows: "Iterable[Row]", options: Mapping[str, float]) -> set[str]:
        """Return the names of the states and counters of parameters."""
        trained = [row for row in rows if row.trained]
        return {name for row in trained for name in (*self.shapes(row, options), *self.counters_of(row))}

    def option_values(self, given: Mapping[str, float]) -> dict[str, float]:
        """Return the values of all options: given values and defaults."""
        return {name: float(option.default) for name, option in self.options.items()} | dict(given)

    def build(self, groups: list[dict[str, Any]], lr: float, options: Mapping[str, float]) -> Any:
        """Return the optimizer, without state."""
        make = pkgutil.resolve_name(self.make) if isinstance(self.make, str) else self.make
        return make(groups, lr, options)


def scale_of(state: str) -> str:
    """Return the name of the state with the scales of a state stored in blocks."""
    return f"{state}_scale"


def n_blocks(columns: int, block_size: float) -> int:
    """Return the number of blocks in a row of `columns` elements."""
    return -(-columns // int(block_size))


OPTIMIZERS: dict[str, OptimizerKind] = {}


def register(kind: OptimizerKind) -> OptimizerKind:
    """Add an optimizer. Raises ConfigError for a name that is taken."""
    return extensions.add(OPTIMIZERS, "an optimizer", kind)


_ADAM_OPTIONS = {
    "beta1": Option(default=0.9, below=1.0, decay=True, help="decay of the mean of gradients"),
    "beta2": Option(default=0.95, below=1.0, decay=True, help="decay of the mean of squared gradients"),
    "eps": Option(default=1e-8, least=1e-45, help="added to the root of the second moment"),
}

register(
    OptimizerKind(
        name="adamw",
        help="AdamW (arXiv 1711.05101), fused",
        options=_ADAM_OPTIONS,
        state=("exp_avg", "exp_avg_sq"),
        counters=("step",),
        normalised=True,
        make="shardwright.training.optimizers.adamw:adamw",
    )
)

register(
    OptimizerKind(
        name="adamw-8bit",
        help="AdamW with 8-bit states (arXiv 2110.02861), in the blocks of the whole matrix on every layout",
        options={
            **_ADAM_OPTIONS,
            "block_size": Option(
                default=256, least=2, at_test_size=8, help="elements of a row that share a scale, at most"
            ),
            "least_elements": Option(
                default=4096, at_test_size=48, help="matrices of fewer elements, and vectors, have states of 32 bits"
            ),
        },
        state=("exp_avg", "exp_avg_sq"),
        counters=("step",),
        in_blocks=True,
        normalised=True,
        step_bytes=WIDENING_BYTES,
        make="shardwright.training.optimizers.adamw_8bit:AdamW8bit",
    )
)


def _sgd_problems(options: Mapping[str, float]) -> Iterable[str]:
    if options["nesterov"] and not options["momentum"]:
        yield "optimizer.nesterov=true looks ahead along the momentum, and optimizer.momentum=0; raise it above 0"


register(
    OptimizerKind(
        name="sgd",
        help="SGD with momentum, weight decay decoupled from the gradient",
        options={
            "momentum": Option(default=0.9, below=1.0, decay=True, help="decay of the sum of gradients"),
            "nesterov": Option(default=False, help="look ahead along the momentum"),
        },
        state=("momentum_buffer",),
        problems=_sgd_problems,
        make="shardwright.training.optimizers.sgd:SGD",
    )
)

register(
    OptimizerKind(
        name="lion",
        help="Lion (arXiv 2302.06675)",
        options={
            "beta1": Option(default=0.9, below=1.0, help="share of the mean in the direction of a step"),
            "beta2": Option(default=0.99, below=1.0, decay=True, help="decay of the mean of gradients"),
        },
        state=("mean",),
        normalised=True,
        make="shardwright.training.optimizers.lion:Lion",
    )
)

register(
    OptimizerKind(
        name="adafactor",
        help="Adafactor (arXiv 1804.04235) without momentum, by the means of whole matrices on whatever layout",
        options={
            "decay_power": Option(default=0.8, least=1e-9, help="second moments of step t decay by 1 - t^-decay_power"),
            "clip_threshold": Option(default=1.0, least=1e-9, help="root mean square that an update is scaled down to"),
            "least_rms": Option(default=1e-3, help="least root mean square of a matrix that steps are relative to"),
        },
        state=("variance",),
        counters=("step",),
        means=("row", "column"),
        step_bytes=24.0,
        make="shardwright.training.optimizers.adafactor:Adafactor",
    )
)


NEWTON_SCHULZ_ITERATIONS = 5


def newton_schulz_flops(rows: int, columns: int) -> float:
    """Return the FLOPs of Muon's iterations for a matrix: 2 (2 m^2 n + m^3) an iteration, sides m <= n."""
    m, n = sorted((rows, columns))
    return 2.0 * NEWTON_SCHULZ_ITERATIONS * (2 * m * m * n + m**3)


register(
    OptimizerKind(
        name="muon",
        help="Muon (arXiv 2502.16982) for hidden matrices, each whole on whatever layout; AdamW for all else",
        options={
            "momentum": Option(
                default=0.95, below=1.0, decay=True, help="decay of the mean of gradients of hidden matrices"
            ),
            "update_rms": Option(default=0.2, least=1e-9, help="root mean square of an update of a hidden matrix / lr"),
            **_ADAM_OPTIONS,
        },
        state=("exp_avg", "exp_avg_sq"),
        counters=("step",),
        matrix_state=("momentum",),
        matrix_flops=newton_schulz_flops,
        make="shardwright.training.optimizers.muon:Muon",
    )
)
