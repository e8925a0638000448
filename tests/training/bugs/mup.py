"""Bugs of muP: a value, a rate or a multiplier that does not follow the width or the depth."""

from shardwright.model.mup import MupSpec
from tests.mutation import Mutation
from tests.training.bugs.bug import ONE, TP, ZERO_3, AnyBug, Bug, UnitBug

_MODULES = "shardwright.model.modules"
_SECTION = "shardwright.config.optimizer:OptimizerSection"
_SPEC = {"mup": MupSpec(base_width=8, base_depth=1)}
_ROWS, _MULTIPLIERS = (f"tests/model/test_mup.py:check_{name}" for name in ("factors_of_rows", "multipliers"))


def _on_one_rank_and_tp(function: str, old: str, new: str) -> Bug:
    return Bug(Mutation(f"{_SECTION}.{function}", old, new), [ONE, TP], spec=_SPEC)


def _unit(function: str, old: str, new: str, test: str) -> UnitBug:
    return UnitBug(Mutation(function, old, new), test)


SCALE: dict[str, AnyBug] = {
    "muP: hidden matrices have the learning rate of the base model": _on_one_rank_and_tp(
        "lr_scale_of", "row.lr_factor * (1.0 if given is None else given)", "1.0 if given is None else given"
    ),
    "muP: weight decay falls with the learning rate": _on_one_rank_and_tp("weight_decay_of", "row.decay_factor", "1.0"),
    "muP: eps is the base model's": _on_one_rank_and_tp("eps_of", "row.eps_factor", "1.0"),
    "muP: eps outside the layers follows the depth": Bug(
        Mutation(f"{_MODULES}:_with_mup", "spec.depth_ratio if in_layer else 1.0", "spec.depth_ratio"),
        [ZERO_3],
        spec=_SPEC,
    ),
    "muP: parameters of one kind share the eps of the first": Bug(
        Mutation(
            "shardwright.training.optimizer:parameter_groups",
            "(decay, scale, eps, hidden, mesh)",
            "(decay, scale, hidden, mesh)",
        ),
        [ONE],
        spec=_SPEC,
    ),
    "muP: initial values do not follow the width": _unit(
        f"{_MODULES}:_with_mup", "row.std * width ** WIDTH_POWERS.get(row.kind, (0.0, 0.0))[0]", "row.std", _ROWS
    ),
    "muP: a router begins as a hidden matrix": _unit(
        f"{_MODULES}:_with_mup",
        "WIDTH_POWERS.get(row.kind, (0.0, 0.0))[0]",
        "WIDTH_POWERS['matrix' if row.kind == 'router' else row.kind][0] if row.kind in WIDTH_POWERS else 0.0",
        _ROWS,
    ),
    "muP: branches begin with the depth of the model, and are divided by it": _unit(
        f"{_MODULES}:residual_std", "2 * spec.n_layers / spec.depth_ratio", "2 * spec.n_layers", _ROWS
    ),
    "muP: branches are not divided by the depth": _unit(
        "shardwright.model.transformer:Block.__init__", "spec.branch_scale", "spec.residual_scale", _MULTIPLIERS
    ),
    "muP: logits are not divided by the width": _unit(
        "shardwright.model.norm:last_norm", "y / spec.logits_divided_by", "y / spec.logit_divisor", _MULTIPLIERS
    ),
    "muP: attention scores fall as the root of the width of a head": _unit(
        "shardwright.model.sizes:ModelSizes.score_scale",
        "(self.attention_scale or 1 / math.sqrt(base)) * base / self.head_dim",
        "self.attention_scale",
        _MULTIPLIERS,
    ),
    "muP: an export has no divisor of the logits": _unit(
        "shardwright.model.spec:ModelSpec.folded",
        "self.logits_divided_by",
        "self.logit_divisor",
        "tests/model/test_mup.py:check_folded_multipliers",
    ),
}
