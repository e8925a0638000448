"""Bugs that bring weights of `transformers` in, or ours out, as those of another model."""

from tests.mutation import Mutation
from tests.training.bugs.bug import AnyBug, UnitBug

TABLE, READER = "shardwright.hugging_face.table", "shardwright.hugging_face.reader:HuggingFaceWeights"
TESTS = "tests/hugging_face/test_families.py"
LOGITS = f"{TESTS}:test_logits_are_those_of_transformers"
SCALED = f"{TESTS}:test_scaled_frequencies_are_those_of_transformers"
ROUND_TRIP = f"{TESTS}:test_a_model_comes_in_and_goes_out_bit_for_bit"
DEFAULTS = "tests/hugging_face/test_defaults.py:check_defaults"
BOXES = f"{TESTS}:test_any_box_is_that_of_the_whole_parameter"

FILES: dict[str, AnyBug] = {
    "rows of interleaved rotated elements are read as halves": UnitBug(
        Mutation(f"{TABLE}:_interleaved", "2 * (i % half) + i // half", "i"), LOGITS, ("deepseek-v3",)
    ),
    "biases of interleaved queries and keys stay in the order of the file": UnitBug(
        Mutation(
            f"{TABLE}:_tensor",
            "tuple(_interleaved(spec, rows[0])) if stored.interleaved else None",
            "tuple(_interleaved(spec, rows[0])) if stored.interleaved and suffix == '.weight' else None",
        ),
        LOGITS,
        ("glm4",),
    ),
    "elements of a head that are not rotated are interleaved too": UnitBug(
        Mutation(
            f"{TABLE}:_interleaved",
            "(('head_rope', spec.rope_dim), ('head', spec.head_dim - spec.rope_dim))",
            "(('head_rope', spec.head_dim),)",
        ),
        LOGITS,
        ("glm4",),
    ),
    "the matrices of gate and up are swapped": UnitBug(
        Mutation(
            "shardwright.hugging_face.reader:file_tensors",
            "{**architecture.layer, **architecture.also(spec)}",
            "architecture.layer | {'ffn.gate': architecture.layer['ffn.up'], 'ffn.up': architecture.layer['ffn.gate']}",
        ),
        LOGITS,
        ("llama",),
    ),
    "experts are read one number too high": UnitBug(
        Mutation(
            f"{TABLE}:_parameter_tensors",
            "stored.format(expert=expert)",
            "stored.format(expert=(expert + 1) % n_experts)",
        ),
        LOGITS,
        ("mixtral",),
    ),
    "a square matrix of a Conv1D is not transposed": UnitBug(
        Mutation(
            f"{READER}._box",
            "tensor.transposed",
            "tensor.transposed and tensor.shape[0] != tensor.shape[1]",
        ),
        LOGITS,
        ("gpt2",),
    ),
    "query, key and value of one matrix are read in another order": UnitBug(
        Mutation(
            f"{TABLE}:FileTensor.first_row",
            "self.parts[:self.parts.index(part)]",
            "self.parts[self.parts.index(part) + 1:]",
        ),
        ROUND_TRIP,
        ("gpt2",),
    ),
    "the epsilon of the norms is not taken": UnitBug(
        Mutation(
            "shardwright.hugging_face.architecture:Architecture.spec",
            "next(iter(stated.values()))",
            "1e-05 if ours == 'norm_eps' else next(iter(stated.values()))",
        ),
        LOGITS,
        ("llama",),
    ),
    "the base of the rotary frequencies is not taken": UnitBug(
        Mutation(
            "shardwright.hugging_face.architecture:read_rope",
            "float(given.pop('rope_theta', None) or config.get('rope_theta', _THETA))",
            "float(given.pop('rope_theta', None) and _THETA)",
        ),
        LOGITS,
        ("llama",),
    ),
    "a shard over tp is read from the first row": UnitBug(
        Mutation(f"{READER}._box", "tensor.first_row(part) + offsets[dim]", "tensor.first_row(part)"), BOXES, ("gpt2",)
    ),
    "a box of a checkpoint is read from the first rows of its shards": UnitBug(
        Mutation(
            "shardwright.training.weights:CheckpointWeights.read",
            "box[target] = self._shard(name, shard)[source]",
            "box[target] = self._shard(name, shard)[tuple(slice(0, each.stop - each.start) for each in source)]",
        ),
        BOXES,
        ("deepseek-v3",),
    ),
    "rotated queries and keys do not get YaRN's factor": UnitBug(
        Mutation("shardwright.model.transformer:rotary_table", "table * spec.rope_scaling.attention_scale", "table"),
        SCALED,
        ("yarn",),
    ),
    "the scores of latent attention get the root of their factor": UnitBug(
        Mutation(
            "shardwright.model.latent_attention:LatentAttention.__init__",
            "spec.rope_scaling.score_scale",
            "spec.rope_scaling.score_scale ** 0.5",
        ),
        LOGITS,
        ("deepseek-v3, no query latent, yarn",),
    ),
    "the selection bias of experts goes out in bf16": UnitBug(
        Mutation(
            "shardwright.training.exporting:_types",
            "dtype is None or model_rows[name].kind == 'balance'",
            "dtype is None",
        ),
        f"{TESTS}:test_a_type_is_changed_when_asked_for_and_a_selection_bias_stays_wide",
    ),
    "Mixtral norms with the epsilon of Llama where none is given": UnitBug(
        Mutation("shardwright.hugging_face.llama:complete", "norm_eps", "1e-6"), DEFAULTS, ("mixtral",)
    ),
}
