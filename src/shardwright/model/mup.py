"""muP: how initial values, learning rates and multipliers follow the width and the depth of a model; no torch.

docs/mup.md has the rules as a table. They are for optimizers whose update of an element has about the size of the
learning rate (`OptimizerKind.normalised`). `WIDTH_POWERS` has the powers of the width by kind of parameter,
`modules._with_mup` and `Row` apply them, and `ModelSizes` has the multipliers.

Sources: Yang et al., Tensor Programs V, arXiv 2203.03466, Table 8 for Adam (a router, whose outputs do not grow with
the width, is an output matrix of Table 3, which has no multiplier); Dey et al., CompleteP, arXiv 2505.01618, Table 1
with alpha = 1, for the depth, weight decay and eps. Both assume that all widths inside a layer grow with d_model.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field

WIDTH_POWERS: dict[str, tuple[float, float]] = {
    "matrix": (-0.5, -1.0),
    "expert": (-0.5, -1.0),
    "router": (-1.0, -1.0),
}
"""Kind of parameter -> the powers of m in its initial standard deviation and in its learning rate; others: 0, 0."""


@dataclass(frozen=True, kw_only=True)
class MupSpec:
    """The base model of muP: the model at whose sizes nothing is scaled, and for which hyper-parameters were found."""

    base_width: int = field(
        default=0,
        metadata={"help": "d_model of the base model, from which width is scaled; 0: width is not scaled."},
    )
    base_depth: int = field(
        default=0,
        metadata={"help": "n_layers of the base model, from which depth is scaled (CompleteP); 0: it is not scaled."},
    )
    base_head_dim: int = field(
        default=0,
        metadata={
            "help": "head_dim of the base model, if heads grow instead of their number: attention scores are scaled by "
            "sqrt(base_head_dim) / head_dim; 0: by 1 / sqrt(head_dim)."
        },
    )

    def problems(self) -> Iterator[str]:
        """Yield every broken rule."""
        sizes = {name: getattr(self, name) for name in ("base_width", "base_depth", "base_head_dim")}
        for name, size in sizes.items():
            if size < 0:
                yield f"mup.{name}={size} is negative; valid: 1 or more, or 0 for no scaling"
        if not any(sizes.values()):
            yield "mup has no base model; give base_width or base_depth, or leave mup out"
