"""Bugs that read or write DeepSpeed's checkpoints; the tensors have other bits then."""

from tests.mutation import Mutation
from tests.training.bugs.bug import AnyBug, UnitBug

DEEPSPEED = "shardwright.conversion.deepspeed"
SEEN = "tests/conversion/test_deepspeed.py:test_a_bug_of_reading_or_writing_deepspeed_changes_bits"
FILES: dict[str, AnyBug] = {
    name: UnitBug(Mutation(f"{DEEPSPEED}:{function}", before, after), SEEN, put_in_there=True)
    for name, function, before, after in (
        (
            "DeepSpeed: the padding of ZeRO-3 is read as values", "_cuts_of_parameters",
            "-(-math.prod(shape) // n_ranks)", "max(1, math.prod(shape) // n_ranks)",
        ),
        (
            "DeepSpeed: parts of ranks are joined from their first element", "DeepSpeedFolder._cut",
            "values.narrow(0, start, count)", "values.narrow(0, 0, count)",
        ),
        (
            "DeepSpeed: every group is read from the first", "DeepSpeedFolder._read_parts",
            "weights[number]", "weights[0]",
        ),
        (
            "DeepSpeed: weights are written for the moments", "write_universal_state",
"tensor_of_file(tensor, values.read, getattr(torch, values.dtypes[tensor.parts[0].name]))",
            "tensor_of_file(tensor, state.weights.read, getattr(torch, values.dtypes[tensor.parts[0].name]))",
        ),
    )
}  # fmt: skip
