"""The optimizers that `[optimizer] name` may say: their options and the state they hold for each parameter. No torch.

`register` adds one, ours as well as a user's. The run file's keys, the optimizer of `train` and `verify`, checkpoints
and the planner's memory and traffic of the optimizer's step read the rows.
"""

import pkgutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from shardwright import extensions


@dataclass(frozen=True, kw_only=True)
class Option:
    """A number that one optimizer has: `[optimizer] beta1`. Valid: `least` <= value < `below`."""

    default: float
    help: str
    least: float = 0.0
    below: float = float("inf")


@dataclass(frozen=True, kw_only=True)
class OptimizerKind:
    """One optimizer.

    Its update of an element depends on that element alone (AdamW, Lion, SGD with momentum); unless there is a
    `matrix_state`, the state of hidden matrices, which it then updates as whole matrices (Muon).

    `options`: its options besides lr, weight_decay and clip_norm, which every optimizer has.
    `state`: names, as the optimizer's `state[parameter]` has them, of tensors of the shape and type of the parameter;
    `counters`: of fp32 scalars. All are zero before the first step.
    `matrix_flops`: (rows, columns) -> FLOPs of the update of a hidden matrix, for the planner.
    `make`: (parameter groups with their weight_decay, lr, option values by name) -> torch.optim.Optimizer; or where to
    import it from, as "module:name". The parameters of one group lie on one device mesh. With `matrix_state` a group
    also says whether its parameters are `hidden` matrices, and has their `rows` (`model.modules.Row`).
    """

    name: str
    help: str
    options: Mapping[str, Option] = field(default_factory=dict)
    state: tuple[str, ...]
    counters: tuple[str, ...] = ()
    matrix_state: tuple[str, ...] | None = None
    matrix_flops: Callable[[int, int], float] = lambda rows, columns: 0.0
    make: Callable[[list[dict[str, Any]], float, Mapping[str, float]], Any] | str

    def held(self, hidden: bool) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """The state and the counters of a hidden matrix, or of another parameter."""
        return (self.matrix_state, ()) if hidden and self.matrix_state is not None else (self.state, self.counters)

    @property
    def names(self) -> set[str]:
        """The names of all states and counters."""
        return {*self.state, *self.counters, *(self.matrix_state or ())}

    def build(self, groups: list[dict[str, Any]], lr: float, options: Mapping[str, float]) -> Any:
        """The optimizer, without state."""
        make = pkgutil.resolve_name(self.make) if isinstance(self.make, str) else self.make
        return make(groups, lr, options)


OPTIMIZERS: dict[str, OptimizerKind] = {}


def register(kind: OptimizerKind) -> OptimizerKind:
    """Add an optimizer. Raises ConfigError for a name that is taken."""
    return extensions.add(OPTIMIZERS, "an optimizer", kind)


_ADAM_OPTIONS = {
    "beta1": Option(default=0.9, below=1.0, help="decay of the mean of gradients"),
    "beta2": Option(default=0.95, below=1.0, help="decay of the mean of squared gradients"),
    "eps": Option(default=1e-8, least=1e-45, help="added to the root of the second moment"),
}

register(
    OptimizerKind(
        name="adamw",
        help="AdamW (arXiv 1711.05101), fused",
        options=_ADAM_OPTIONS,
        state=("exp_avg", "exp_avg_sq"),
        counters=("step",),
        make="shardwright.training.optimizer:adamw",
    )
)


NEWTON_SCHULZ_ITERATIONS = 5


def newton_schulz_flops(rows: int, columns: int) -> float:
    """FLOPs of Muon's iterations for a matrix: 2 (2 m^2 n + m^3) an iteration, m the shorter side and n the longer."""
    m, n = sorted((rows, columns))
    return 2.0 * NEWTON_SCHULZ_ITERATIONS * (2 * m * m * n + m**3)


register(
    OptimizerKind(
        name="muon",
        help="Muon (arXiv 2502.16982) for hidden matrices, each whole on whatever layout; AdamW for all else",
        options={
            "momentum": Option(default=0.95, below=1.0, help="decay of the mean of gradients of hidden matrices"),
            "update_rms": Option(default=0.2, least=1e-9, help="root mean square of an update of a hidden matrix / lr"),
            "adamw_lr_scale": Option(default=1.0, help="learning rate of all other parameters / lr"),
            **_ADAM_OPTIONS,
        },
        state=("exp_avg", "exp_avg_sq"),
        counters=("step",),
        matrix_state=("momentum",),
        matrix_flops=newton_schulz_flops,
        make="shardwright.training.muon:Muon",
    )
)
