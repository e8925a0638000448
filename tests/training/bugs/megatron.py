"""Bugs that read or write Megatron's checkpoints; a proof refuses them, or tensors have other bits."""

from tests.mutation import Mutation
from tests.training.bugs.bug import AnyBug, UnitBug

MEGATRON = "shardwright.conversion.megatron"
WRITER = f"{MEGATRON}_writer"
SEEN = "tests/conversion/test_megatron.py:test_a_bug_of_reading_or_writing_megatron_is_refused_or_changes_bits"
FILES: dict[str, AnyBug] = {
    name: UnitBug(Mutation(f"{module}:{function}", before, after), SEEN, put_in_there=True)
    for name, module, function, before, after in (
        (
            "Megatron: queries, keys and values are stacked whole", "shardwright.hugging_face.table", "_by_kv_head",
            "(kv * (n_queries + 2) + place) * c", "(place * spec.n_kv_heads + kv) * c",
        ),
        (
            "Megatron: every layer is read from the first", MEGATRON, "MegatronFolder._places_of",
            '{f"{MEGATRON_LAYERS}{number}.{rest}": (number,) for number in range(record.shape[0])}',
            '{f"{MEGATRON_LAYERS}{number}.{rest}": (0,) for number in range(record.shape[0])}',
        ),
        (
            "Megatron: gate and up are swapped", MEGATRON, "MegatronFolder._places_of",
            'int(name.endswith(".weight_v"))', 'int(name.endswith(".weight_w"))',
        ),
        (
            "Megatron: weights are written for the moments", WRITER, "write_megatron_state",
            "_chunks(layers, values, stacked)", "_chunks(layers, state.weights, stacked)",
        ),
        (
            "Megatron: layers are written in the order of their names as text", WRITER, "write_megatron_state",
            "layers.sort(key=lambda tensor: _layer(tensor.name))",
            "layers.sort(key=lambda tensor: -_layer(tensor.name))",
        ),
        (
            "Megatron: a step too few is written", WRITER, "_optimizer",
            '{"wd_mult": float(not is_flat), "lr_mult": 1.0, "is_expert_parallel": experts, STEP: state.step}',
            '{"wd_mult": float(not is_flat), "lr_mult": 1.0, "is_expert_parallel": experts, STEP: state.step - 1}',
        ),
        (
            "Megatron: norms and biases are read with weight decay", MEGATRON, "MegatronFolder._group_of",
            'len(record.shape) == 1 or name.endswith(".bias")', "False",
        ),
    )
}  # fmt: skip
