"""Bugs of the loss scale of fp16: an overflow that only some ranks see, a scale that is forgotten or counted twice."""

from dataclasses import replace

from shardwright.layout.layout import Layout
from tests.mutation import Mutation
from tests.training import test_loss_scale
from tests.training.bugs.bug import DUALPIPE, EXPERTS, ONE, PASSES, PP, TRAINER, ZERO_2, AnyBug, Bug, UnitBug

_SCALER = "shardwright.training.loss_scale:LossScaler.takes"
_RULE = "tests/training/test_loss_scale.py:test_the_scale_changes_by_the_rule"
_SEEN = "tests/training/test_loss_scale.py:test_a_bug_is_seen"
_FACTOR = "(max_norm / (norm + 1e-6)).clamp(max=1.0) / loss_scale"
_CHUNKED = Layout(dp_shard=2, zero=2, loss_chunk_tokens=7)


_NORM = "gradient_norm(parameters, self.model.holders, self.model.groups.pp, self.local_norms)"
_LOCAL = "torch.stack([getattr(p.grad, '_local_tensor', p.grad).norm() for p in parameters]).norm()"


def _in_fp16(mutation: Mutation, *layouts: Layout, **spec: object) -> Bug:
    return Bug(mutation, list(layouts), dtype="float16", spec=spec)


def _there(name: str) -> UnitBug:
    _, mutation = test_loss_scale.BUGS[name]
    return UnitBug(mutation, _SEEN, put_in_there=True)


def _rule_bug(before: str, after: str) -> UnitBug:
    return UnitBug(Mutation(_SCALER, before, after), _RULE)


REDUCTION: dict[str, AnyBug] = {
    "an overflow is seen by the ranks alone that hold it": _in_fp16(
        Mutation(
            f"{PASSES}:ForwardBackward.clip",
            _NORM,
            f"(lambda norm: norm if norm.isfinite() else {_LOCAL})({_NORM})",
        ),
        PP,
        ZERO_2,
    ),
}
SCALE: dict[str, AnyBug] = {
    "gradients are clipped before they are divided by the loss scale": _in_fp16(
        Mutation(
            f"{PASSES}:ForwardBackward.clip",
            f"{_NORM} / self.loss_scale",
            _NORM,
        ),
        ONE,
    ),
    "gradients are not divided by the loss scale": _in_fp16(
        Mutation(
            "shardwright.training.forward_backward:clip_gradients", _FACTOR, _FACTOR.removesuffix(" / loss_scale")
        ),
        ONE,
    ),
    "losses of routers are not multiplied by the loss scale": _there(
        "losses of routers are not multiplied by the loss scale"
    ),
    "the gradient of a chunked loss is multiplied by its factor twice": _in_fp16(
        Mutation("shardwright.parallel.loss:_ChunkedLossFunction.backward", "dtotal / factor", "dtotal"), _CHUNKED
    ),
    "the gradient of logits is multiplied by its factor twice": _in_fp16(
        Mutation("shardwright.parallel.loss:_LossFunction.backward", "dtotal / factor", "dtotal"), ONE, PP
    ),
    "the gradient of logits in fp16 is rounded before it is multiplied by its factor": UnitBug(
        Mutation(
            "shardwright.parallel.loss:_LossFunction.forward",
            "_factor(factor, logits_BTv)",
            "_factor(None, logits_BTv)",
        ),
        "tests/parallel/test_loss.py:test_the_gradient_in_16_bits_is_rounded_once_and_in_the_memory_of_the_logits",
        (False,),
    ),
    "the exponentials of logits in 16 bits are computed again with the largest logit of another token": UnitBug(
        Mutation(
            "shardwright.parallel.loss:cross_entropy",
            "_split(n_together, logits_Nv, largest_N[:, None], weights_N1 / sum_N[:, None])",
            "_split(n_together, logits_Nv, largest_N.roll(1)[:, None], weights_N1 / sum_N[:, None])",
        ),
        "tests/parallel/test_loss.py:test_the_gradient_in_16_bits_is_rounded_once_and_in_the_memory_of_the_logits",
        (True,),
    ),
    "the loss of a step has the loss scale in it": _in_fp16(
        Mutation(f"{PASSES}:ForwardBackward.forward_backward", "loss_part / self.loss_scale", "loss_part"),
        ONE,
        PP,
    ),
    "steps before an overflow count for the window after it": _rule_bug(
        "state.clean, state.left, state.skipped = (0, state.left - 1, state.skipped + 1)",
        "state.left, state.skipped = (state.left - 1, state.skipped + 1)",
    ),
    "every overflow halves the loss scale": _rule_bug("state.left <= 0", "state.left <= 99"),
    "the hysteresis is not filled up when the scale is doubled": _rule_bug(
        "state.clean, state.left, state.scale = (0, self.hysteresis, 2 * state.scale)",
        "state.clean, state.scale = (0, 2 * state.scale)",
    ),
}
STALE: dict[str, AnyBug] = {
    "weights and states are updated in a step that overflowed": _in_fp16(
        Mutation(
            f"{TRAINER}.update",
            "self.scaler is None or self.scaler.takes(norm)",
            "self.scaler is None or self.scaler.takes(norm) or True",
        ),
        ONE,
        ZERO_2,
        DUALPIPE,
    ),
    "a step that overflowed updates the biases of routers": _in_fp16(
        Mutation(f"{TRAINER}.update", "self.model.learn_from_load(update=taken)", "self.model.learn_from_load()"),
        ONE,
        moe=replace(EXPERTS, aux_scope="sequence"),
    ),
    "gradients of a step that overflowed are added to those of the next": _there(
        "gradients of a step that overflowed are added to those of the next"
    ),
}
RESUME: dict[str, AnyBug] = {
    "the loss scale begins anew on a resume": _there("the loss scale begins anew on a resume"),
    "the loss scale is not saved": _there("the loss scale is not saved"),
}
