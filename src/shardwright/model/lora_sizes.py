"""Low-rank adapters (LoRA): their table in the run file, the matrices that have one, and their scale; no torch.

With an adapter a linear computes y = x W^T + s (x A^T) B^T. W (out, in) is frozen; A (r, in) and B (out, r) are
trained. B is zero at first, so a run starts with the outputs of the base weights. Sources: Hu et al., LoRA, arXiv
2106.09685, section 4.1; Kalajdzievski, rsLoRA, arXiv 2312.03732, for s = alpha / sqrt(r).
"""

import math
from dataclasses import dataclass, field

GROUPS = {
    "attention": "all matrices of attention",
    "ffn": "all matrices of feed-forward networks and of shared experts",
}
"""The targets that name several matrices of a layer."""


@dataclass(frozen=True, kw_only=True)
class LoraSpec:
    """The adapters of a model whose other parameters are frozen."""

    rank: int = field(
        metadata={"help": "Rank r of the adapter of each target, A (r, in) and B (out, r); 0: all weights are trained."}
    )
    alpha: float = field(
        default=16.0, metadata={"help": "The output of an adapter is multiplied by alpha / rank (LoRA, section 4.1)."}
    )
    targets: tuple[str, ...] = field(
        default=("attention", "ffn"),
        metadata={
            "help": "The matrices with an adapter: attention or ffn for all matrices of these modules, or last parts "
            "of a matrix's name, such as q, ffn.down or shared.up."
        },
    )
    rslora: bool = field(
        default=False,
        metadata={"help": "Multiply by alpha / sqrt(rank) instead, with which outputs do not fall with the rank."},
    )

    def __post_init__(self) -> None:
        object.__setattr__(self, "targets", tuple(self.targets))  # files have lists

    @property
    def scale(self) -> float:
        """The factor s of an adapter's output."""
        return self.alpha / (math.sqrt(self.rank) if self.rslora else self.rank)

    def takes(self, module: str) -> bool:
        """Return whether the matrix of a module, such as `attention.q` within a layer, has an adapter."""
        return any(names(target, module) for target in self.targets)


def names(target: str, module: str) -> bool:
    """Return whether a target names the matrix of a module."""
    parts, last = module.split("."), target.split(".")
    return target in parts[:-1] if target in GROUPS else parts[-len(last) :] == last
