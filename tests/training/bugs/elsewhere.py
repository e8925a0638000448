"""Bugs that tests of other files put in, in families, with the names that they have there."""

from tests.api import test_distributed
from tests.generation import test_lm_eval
from tests.mutation import Mutation
from tests.parallel import test_context
from tests.training import test_checkpoint, test_checkpoint_damage, test_tf32
from tests.training.bugs.bug import UnitBug

_ATTENTION = "tests/parallel/test_context.py:test_a_wrong_backward_behind_a_right_forward_is_noticed"
_LOOP = "tests/api/test_distributed.py:test_a_bug_is_seen"
_STALE = "tests/training/test_checkpoint.py:test_bug_24_a_parameter_group_that_is_stale_after_a_resume_is_seen"
_LM_EVAL = "tests/generation/test_lm_eval.py:test_a_bug_is_seen"
_CAST = "tests/training/test_checkpoint.py:test_bug_23_a_dtype_that_is_cast_in_loading_would_be_seen"


def _attention_bug(name: str) -> UnitBug:
    (mutation,) = test_context.BUGS[name].bugs
    return UnitBug(mutation, _ATTENTION, put_in_there=True)


def _loop_bug(name: str) -> UnitBug:
    _, mutation = test_distributed.BUGS[name]
    return UnitBug(mutation, _LOOP, put_in_there=True)


def _lm_eval_bug(name: str) -> dict[str, UnitBug]:
    _, mutation = test_lm_eval.BUGS[f"lm-eval: {name}"]
    return {f"lm-eval: {name}": UnitBug(mutation, _LM_EVAL, put_in_there=True)}


SCALE = {
    **_lm_eval_bug("a long text has the log-likelihood of its last part"),
    "attention's backward pass takes a block's own log-sum-exp": _attention_bug(
        "a block's own log-sum-exp in backward"
    ),
    "the norm counts an embedding once for each rank of pp that holds it": _loop_bug(
        "the norm counts an embedding once for each rank of pp that holds it"
    ),
}
REDUCTION = {
    "the last hop of the gradients of keys and values is dropped": _attention_bug("the gradients' last hop dropped"),
    "the gradient of the own block of keys is forgotten": _attention_bug("the own block's gradient forgotten"),
    "gradients of replicated kv heads are not summed in ulysses": _attention_bug(
        "gradients of copied kv heads not summed"
    ),
}
SHARD = {
    "gradients of keys come home to the next rank": _attention_bug("gradients come home to the next rank"),
}
ORDER = {
    "gradients of the early keys are added to the late": _attention_bug(
        "gradients of the early keys added to the late"
    ),
    "the gradient of the late queries is added to the early": _attention_bug(
        "the late queries' gradient added to the early"
    ),
    "gradients for other ranks are sent in another order": _attention_bug(
        "gradients for other ranks sent in another order"
    ),
}
STALE = {
    **_lm_eval_bug("all contexts are continued as the first one wants"),
    "gradients that were let go are not put back into the buckets": _loop_bug(
        "gradients that were let go are not put back into the buckets"
    ),
    "the second copy of a tied embedding keeps its old values": _loop_bug(
        "the second copy of a tied embedding keeps its old values"
    ),
    "a loop of one's own keeps the gradients of the step before": _loop_bug("gradients of the step before are kept"),
}
DTYPE = {
    **{
        name: UnitBug(mutation, "tests/training/test_tf32.py:test_a_bug_is_seen", put_in_there=True)
        for name, (_, mutation) in test_tf32.BUGS.items()
    },
    "MFU of a run in TF32 is that of one in fp32": UnitBug(
        Mutation("shardwright.training.numbers:LogNumbers._speed", "self.config.precision.tf32", "False"),
        "tests/training/test_tf32.py:test_mfu_goes_by_the_peak_of_the_type_that_is_multiplied_in",
    ),
}
MASK = _lm_eval_bug("the stop texts of a task are not used")
OFF_BY_ONE = {
    **_lm_eval_bug("a continuation is scored without the first token that fits before it"),
    **_lm_eval_bug("a context is cut to what fits without the new tokens"),
}
FILES = {
    name: UnitBug(
        mutation, "tests/training/test_checkpoint_damage.py:test_a_bug_of_checksums_is_seen", put_in_there=True
    )
    for name, mutation in test_checkpoint_damage.BUGS.items()
}
RESUME = {
    "23: a type is cast in loading": UnitBug(test_checkpoint.CAST_IN_LOADING, _CAST, put_in_there=True),
    "24: the weight decay is that of the checkpoint": UnitBug(
        test_checkpoint.STALE["weight decay of the checkpoint"], _STALE, put_in_there=True
    ),
}
