"""Bugs that convert a checkpoint into another one; `convert --prove` has to refuse the result."""

from tests.mutation import Mutation
from tests.training.bugs.bug import AnyBug, UnitBug

DCP, OWN = "shardwright.conversion.dcp_state", "shardwright.conversion.own"
PROOF = "tests/conversion/test_convert.py:test_a_bug_of_the_conversion_is_refused_by_its_proof"


def seen(function: str, before: str, after: str) -> AnyBug:
    return UnitBug(Mutation(function, before, after), PROOF, put_in_there=True)


FILES: dict[str, AnyBug] = {
    "converted: the two moments are swapped": seen(
        f"{DCP}:write_dcp_state", "('optimizer', 'state', tensor.name, kind)",
        "('optimizer', 'state', tensor.name, {'exp_avg': 'exp_avg_sq', 'exp_avg_sq': 'exp_avg'}[kind])",
    ),
    "converted: the moments keep the order of rows that the weights lose": seen(
        f"{DCP}:write_dcp_state", "_write(writer, ('optimizer', 'state', tensor.name, kind), tensor, moments)",
        "_write(writer, ('optimizer', 'state', tensor.name, kind), replace(tensor, order=None), moments)",
    ),
    "converted: AdamW has counted one step more": seen(
        f"{OWN}:write_own_state", "torch.tensor(float(state.step or 0))", "torch.tensor(float(state.step or 0) + 1)"
    ),
    "converted: the learning rate of the step before": seen(
        "shardwright.conversion.state:settings_of_run",
        "learning_rate(step, config.steps, section.lr, config.lr_schedule, config.clock)",
        "learning_rate(step - 1, config.steps, section.lr, config.lr_schedule, config.clock)",
    ),
    "converted: square matrices are transposed": seen(
        "shardwright.hugging_face.writer:tensor_of_file", "whole.mT if tensor.transposed else whole",
        "whole.mT if tensor.transposed or whole.dim() == 2 and whole.shape[0] == whole.shape[1] else whole",
    ),
    "converted: rotated rows keep their order": seen(
        "shardwright.hugging_face.writer:tensor_of_file", "tensor.order is not None", "False"
    ),
    "converted: a shard is read as the first": seen(
        "shardwright.training.weights:ShardedTensors.read",
        "self._shard(name, shard)[source]", "self._shard(name, record.shards[0])[source]",
    ),
    "converted: weights of gate and up are swapped": seen(
        f"{DCP}:_write", "tensor_of_file(tensor, weights.read, dtype)",
        "tensor_of_file(tensor, lambda name, *box: weights.read(name.replace('gate', 'up'), *box), dtype)",
    ),
}  # fmt: skip
