"""Bugs of optimizers: means of a shard, a sign that is never zero, a state rounded in another way, another's rate."""

from typing import Any

from shardwright.layout.layout import Layout
from tests.mutation import Mutation
from tests.training.bugs.bug import EVEN, TP, AnyBug, Bug, UnitBug

_ADAFACTOR = "shardwright.training.optimizers.adafactor:_AdafactorParameter"
_IN_8_BITS = "shardwright.training.optimizers.adamw_8bit"
_LION, _SGD = "shardwright.training.optimizers.lion:Lion", "shardwright.training.optimizers.sgd:SGD"
_FORMULA = "tests/training/test_optimizers.py:test_steps_are_those_of_the_formula"
_ROUNDED = "tests/training/test_optimizers.py:test_states_in_bf16_are_rounded_after_the_step_has_used_them"
_IN_BLOCKS = "tests/training/test_adamw_8bit.py:test_moments_are_rounded_in_blocks_of_rows_after_the_step_has_used_them"
_MOMENTUM = "tests/training/test_optimizers.py:test_momentum_in_bf16_is_rounded_after_the_direction_is_made"
_SHARDED = Layout(dp_shard=2, zero=2)
_PLAIN = "biases, tied"


def _shard_bug(method: str, total: str, groups: str, layouts: list[Layout]) -> Bug:
    """A sum of Adafactor's that stays that of the shard."""
    return Bug(
        Mutation(f"{_ADAFACTOR}.{method}", f"{total}, self.{groups}", f"{total}, ()"), layouts, optimizer="adafactor"
    )


REDUCTION: dict[str, AnyBug] = {
    "the scale of a block of 8-bit states is that of a shard of its columns": Bug(
        Mutation(
            f"{_IN_8_BITS}:AdamW8bit.step", "reduce_together(zip(parts, over, strict=True), dist.ReduceOp.MAX)", "None"
        ),
        [TP],
        optimizer="adamw-8bit",
    ),
    "Adafactor takes the means over columns of a shard of rows": _shard_bug(
        "squares", "self.of_columns_EPC", "over_rows", [TP, _SHARDED]
    ),
    "Adafactor takes the means over rows of a shard of columns": _shard_bug(
        "squares", "self.of_rows_ER", "over_columns", [TP]
    ),
    "Adafactor divides by the mean of the row means of a shard": _shard_bug(
        "moments", "self.r_mean_EP", "over_rows", [TP, _SHARDED]
    ),
    "Adafactor clips an update by the root mean square of a shard": _shard_bug(
        "direction", "self.u_square_EP", "over_all", [TP, _SHARDED]
    ),
    "Adafactor's steps are relative to the size of a shard": _shard_bug(
        "squares", "self.w_square_EP", "over_all", [TP, _SHARDED]
    ),
}
SHARD: dict[str, AnyBug] = {
    "blocks of 8-bit states begin where a shard begins": Bug(
        Mutation(f"{_IN_8_BITS}:_Blocks.__init__", "divmod(offsets[-1], self.size)", "(0, 0)"),
        [TP, Layout(dp_shard=2, tp=2, zero=3)],
        optimizer="adamw-8bit",
    ),
    "Adafactor clips the parts of a stacked matrix by one root mean square": UnitBug(
        Mutation(
            f"{_ADAFACTOR}.apply",
            "u_rms_EP / group['clip_threshold']",
            "u_rms_EP.square().mean(1, keepdim=True).sqrt() / group['clip_threshold']",
        ),
        _FORMULA,
        ("adafactor", "latent attention"),
    ),
    "a row of a stacked matrix has the column means of another part": UnitBug(
        Mutation(
            "shardwright.training.optimizers.adafactor:_part_of_rows", "at % len(of_head)", "(at + 1) % len(of_head)"
        ),
        _FORMULA,
        ("adafactor", "latent attention"),
    ),
}
OFF_BY_ONE: dict[str, AnyBug] = {
    "8-bit states are rounded to the next number of the table, not the nearest": UnitBug(
        Mutation(f"{_IN_8_BITS}:borders", "(numbers[:-1] + numbers[1:]) / 2", "numbers[:-1].clone()"), _IN_BLOCKS
    ),
    "matrices of as many elements as make 8-bit states worth it keep 32 bits": UnitBug(
        Mutation(
            "shardwright.optimizers:OptimizerKind.has_codes",
            "row.numel >= options['least_elements']",
            "row.numel > options['least_elements']",
        ),
        "tests/training/test_adamw_8bit.py:test_a_matrix_of_the_least_elements_has_8_bits",
    ),
}
DTYPE: dict[str, AnyBug] = {
    "a small second moment of 8 bits is rounded to 0": UnitBug(
        Mutation(f"{_IN_8_BITS}:borders", "not signed", "False"),
        "tests/training/test_adamw_8bit.py:test_blocks_of_very_small_and_large_gradients_are_rounded_as_any",
        (1e15,),
    ),
    "states in bf16 are rounded towards zero": UnitBug(
        Mutation(
            "shardwright.training.on_shards:_keep_state",
            "local_part(before).copy_(value)",
            "local_part(before).copy_((value.float().view(torch.int32) & -65536).view(torch.float32))",
        ),
        _ROUNDED,
    ),
    "Muon's momentum in bf16 is rounded before the direction is made of it": UnitBug(
        Mutation(
            "shardwright.training.optimizers.muon:Muon._direction",
            "gradient.lerp(momentum, mu)",
            "gradient.lerp(stored.to(weights.dtype), mu)",
        ),
        _MOMENTUM,
    ),
}
STALE: dict[str, AnyBug] = {
    "the scales of 8-bit states are those of the step before": UnitBug(
        Mutation(
            f"{_IN_8_BITS}:AdamW8bit.step",
            """
            scale.copy_(part)
            member.round(name, wide[name], scale, local_part(self.state[member.parameter][name]))
            """,
            """
            member.round(name, wide[name], part, local_part(self.state[member.parameter][name]))
            scale.copy_(torch.where(scale > 0, scale, part))
            """,
        ),
        _IN_BLOCKS,
    ),
    "states in bf16 of all buckets but the last are not stored": UnitBug(
        Mutation(
            "shardwright.training.on_shards:OptimizerOnShards.step",
            "_keep_state(parameter, shard, self.state)",
            "_keep_state(parameter, shard, self.state) if group is self.param_groups[-1] else None",
        ),
        _ROUNDED,
    ),
}
_BY_HAND = "tests/training/test_muon.py:test_each_logical_matrix_is_updated_by_itself"


def _default(function: str, option: str, value: str, test: str, *given: Any) -> UnitBug:
    """An option is not read."""
    return UnitBug(Mutation(f"shardwright.training.optimizers.{function}", option, value), test, given)


SCALE: dict[str, AnyBug] = {
    "Adafactor decays with the default power": _default(
        "adafactor:_AdafactorParameter.moments", "self.group['decay_power']", "0.8", _FORMULA, "adafactor", _PLAIN
    ),
    "Adafactor clips an update at the default threshold": _default(
        "adafactor:_AdafactorParameter.apply", "group['clip_threshold']", "1.0", _FORMULA, "adafactor", _PLAIN
    ),
    "Adafactor's steps are relative to the default least size": _default(
        "adafactor:_AdafactorParameter.apply", "group['least_rms']", "0.001", _FORMULA, "adafactor", _PLAIN
    ),
    "Lion's mean decays by the default": _default("lion:Lion.step", "group['beta2']", "0.99", _FORMULA, "lion", _PLAIN),
    "SGD has the default momentum": _default("sgd:SGD.__init__", "options['momentum']", "0.9", _FORMULA, "sgd", _PLAIN),
    "Muon has the default momentum": _default(
        "muon:Muon._direction", "self._groups[number]['momentum']", "0.95", _BY_HAND, EVEN
    ),
    "Muon's updates have the default size": _default(
        "muon:Muon._orthogonal", "group['update_rms']", "0.2", _BY_HAND, EVEN
    ),
    "8-bit AdamW has the default epsilon": _default("adamw_8bit:_update", "group['eps']", "1e-8", _IN_BLOCKS),
    "8-bit AdamW has the default decay of squares": _default(
        "adamw_8bit:_update", "group['beta2']", "0.95", _IN_BLOCKS
    ),
    "8-bit states are widened without their scale": UnitBug(
        Mutation(
            f"{_IN_8_BITS}:_AdamW8bitParameter.moments", "self.blocks.by_block(torch.mul, numbers, scale)", "numbers"
        ),
        _IN_BLOCKS,
    ),
    "a kind of parameter has the learning rate of another": UnitBug(
        Mutation(
            "shardwright.training.optimizer:parameter_groups",
            "(decay, scale, eps, hidden, mesh)",
            "(decay, eps, hidden, mesh)",
        ),
        _FORMULA,
        ("by kind", _PLAIN),
    ),
    "a weight decay of 0 for a kind is left out": UnitBug(
        Mutation("shardwright.config.optimizer:OptimizerSection.weight_decay_of", "given is not None", "given"),
        _FORMULA,
        ("by kind", _PLAIN),
    ),
    "Lion steps where its direction is zero": UnitBug(
        Mutation(
            f"{_LION}.step",
            "foreach_sign_(directions)",
            "directions = [torch.where(each >= 0, 1.0, -1.0).to(each.dtype) for each in directions]",
        ),
        _FORMULA,
        ("lion", _PLAIN),
    ),
    "Lion's mean decays by the share of its direction": UnitBug(
        Mutation(f"{_LION}.step", "1 - group['beta2']", "1 - group['beta1']"), _FORMULA, ("lion", _PLAIN)
    ),
    "SGD takes weight decay into its momentum, too": UnitBug(
        Mutation(f"{_SGD}.__init__", "group.pop('weight_decay')", "group['weight_decay']"), _FORMULA, ("sgd", _PLAIN)
    ),
}
