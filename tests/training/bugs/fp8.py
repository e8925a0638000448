"""Bugs of fp8: a scale of a shard and not of the whole tensor, a scale of another micro-batch, another format."""

from typing import Any

from shardwright.layout.layout import Layout
from shardwright.model.number_formats import Fp8
from tests.mutation import Mutation
from tests.training.bugs.bug import EP, EXPERTS, LATENT, PP, SP, TP, ZB, ZERO_0, ZERO_3, ZIGZAG, AnyBug, Bug, UnitBug

_USE, _SCALE = "shardwright.parallel.apply:use_fp8", "shardwright.model.fp8:Fp8Linear.scale"
_OF_PASS = "shardwright.model.fp8:Fp8Linear.for_pass"
_NEW = "Fp8Linear(self.settings, self.shared, {})"
_RESULT = "(amax.clamp(min=_LEAST) / largest).float()"
_CROSSED = '{"tensorwise": (along_rows, along_k), "rowwise": (along_k,), "blockwise": ()}'
_TENSORWISE, _ROWWISE = Fp8("tensorwise"), Fp8("rowwise")
_TYPES = "tests/model/test_fp8.py:test_every_operand_has_the_type_of_its_recipe"


def _bug(function: str, before: str, after: str, *layouts: Layout, fp8: Fp8 = _TENSORWISE, **spec: Any) -> Bug:
    return Bug(Mutation(function, before, after), list(layouts), fp8=fp8, spec=spec)


_WITH_EXPERTS, _GROUPED = Fp8("tensorwise", experts=True), "shardwright.model.fp8:Fp8Linear.grouped"


REDUCTION: dict[str, AnyBug] = {
    "fp8: the scale of a row-parallel input is that of a shard": _bug(
        _USE, "OperandShards(maximum(*context), inputs=maximum(tp))", "OperandShards(maximum(*context))", TP, SP
    ),
    "fp8: the scale of a column-parallel output's gradient is that of a shard": _bug(
        _USE, "OperandShards(maximum(*context), outputs=maximum(tp))", "OperandShards(maximum(*context))", TP, SP
    ),
    "fp8: the scale of an activation is that of the tokens of a rank of cp": _bug(
        _USE, "(groups.cp_ring, groups.cp_ulysses)", "(None, None)", ZIGZAG, Layout(cp=2, cp_method="ulysses")
    ),
    "fp8: the scale of a replicated linear is that of its token shard": _bug(
        _USE, "tp if layout.token_shards else None", "None", SP, n_kv_heads=4, latent_attention=LATENT
    ),
    "fp8: scales of rows are those of a shard of the row": _bug(
        _SCALE, _CROSSED, _CROSSED.replace("(along_k,)", "()"), TP, SP, ZIGZAG, fp8=_ROWWISE
    ),
    "fp8: largest values are summed over ranks": _bug(
        "shardwright.parallel.fp8:_maximum", "dist.ReduceOp.MAX", "dist.ReduceOp.SUM", TP, ZIGZAG
    ),
}
STALE: dict[str, AnyBug] = {
    "fp8: the scale of the first micro-batch is kept": _bug(
        _SCALE,
        _RESULT,
        f"self.__dict__.setdefault(str((dtype, rows, x_RK.shape)), {_RESULT})",
        ZERO_0,
        ZERO_3,
        fp8=_ROWWISE,
    ),
    "fp8: the scales of the first pass are those of all passes": _bug(
        _OF_PASS, _NEW, _NEW.replace("{}", "self.__dict__.setdefault('first', {})"), ZERO_0, ZERO_3, TP
    ),
}
SHARD: dict[str, AnyBug] = {
    "fp8: the rows that are sent to a rank's experts have one scale": _bug(
        _GROUPED,
        "by_row.scaled(rows_RK, dtype, None, None, 1)",
        "self.scaled(rows_RK, dtype, None, None, 1)",
        EP,
        fp8=_WITH_EXPERTS,
        moe=EXPERTS,
    ),
    "fp8: the experts of a rank have one scale": _bug(
        _GROUPED, "weight_ENK.flatten(1)", "weight_ENK.reshape(1, -1)", EP, fp8=_WITH_EXPERTS, moe=EXPERTS
    ),
    "fp8: the layers that are left out are counted from the start of a stage": _bug(
        _USE,
        "fp8.rows(model.spec, int(number))",
        "fp8.rows(model.spec, list(model.layers).index(number))",
        PP,
        fp8=Fp8("tensorwise", skip_layers=1),
        n_layers=4,
    ),
}
DTYPE: dict[str, AnyBug] = {
    "fp8: a gradient of weights that is deferred is not in fp8": _bug(
        "shardwright.parallel.pipeline.stage:_add_gradient",
        "weight.grad = matmul.weight_gradient(dy, x, counts_E, recipe=recipe)",
        "weight.grad = matmul.weight_gradient(dy, x, counts_E)",
        ZB,
    ),
    "fp8: gradients are in e4m3 where e5m2 was asked for": UnitBug(
        Mutation("shardwright.model.fp8:Fp8Linear.input_gradient", "self.gradient", "FORWARD"), _TYPES
    ),
    "fp8: the gradient of a weight takes dy in e4m3 where e5m2 was asked for": UnitBug(
        Mutation("shardwright.model.fp8:Fp8Linear.weight_gradient", "self.gradient", "FORWARD"), _TYPES
    ),
}
SCALE: dict[str, AnyBug] = {
    "fp8: gradients of experts' outputs are in e4m3 where e5m2 was asked for": UnitBug(
        Mutation("shardwright.model.matmul:input_gradient", "FORWARD if fp8 is None else fp8.gradient", "FORWARD"),
        "tests/model/test_fp8.py:test_experts_multiply_rounded_rows_by_rounded_matrices",
    ),
    "fp8: the scale goes by the largest number of the other format": UnitBug(
        Mutation(_SCALE, "torch.finfo(dtype).max", "torch.finfo(GRADIENT['tensorwise']).max"),
        "tests/model/test_fp8.py:test_operands_are_rounded_to_the_nearest_number_of_the_format",
    ),
    "fp8: rows have one scale": UnitBug(
        Mutation(
            _SCALE,
            "torch.linalg.vector_norm(x_RK, torch.inf, 1, keepdim=True, dtype=wide)",
            "x_RK.abs().amax().to(wide).expand(len(x_RK), 1)",
        ),
        "tests/model/test_fp8.py:test_operands_are_rounded_to_the_nearest_number_of_the_format",
    ),
}
