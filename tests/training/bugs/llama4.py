"""Chunks of attention, temperatures, norms without weight, scaled inputs of experts, and weights in mxfp4."""

from tests.generation import models
from tests.mutation import Mutation
from tests.training.bugs.bug import ALLGATHER, CONTEXT, ON_RING, ZIGZAG, AnyBug, Bug, UnitBug
from tests.training.bugs.windows import CACHE, FORMULA, LOGITS, PLAN

CHUNK = {"window": 4, "window_chunked": True, "n_layers": 2}
TEMPERED = {"nope_interval": 2, "temperature_scale": 0.5, "temperature_interval": 3}
EXPERTS, BLOCK = "shardwright.model.experts", "shardwright.model.transformer:Block.forward"
LAYER = "tests/model/test_moe.py:test_a_layer_is_the_weighted_sum_of_its_experts"
CONTINUATION = "tests/generation/test_engine.py:a_long_continuation_is_that_of_the_whole_sequence"

MASK: dict[str, AnyBug] = {
    "a chunk has one token more": UnitBug(
        Mutation(
            "shardwright.model.piece_attention:causal_pieces",
            "chunk_lengths(length, window)",
            "chunk_lengths(length, window + 1)",
        ),
        FORMULA,
        (7, True),
    ),
    "one device attends to a window instead of a chunk": UnitBug(
        Mutation("shardwright.model.attention:piece_attention", "rule.chunked", "False"), LOGITS, ("llama4",)
    ),
    "a ring attends to a window instead of a chunk": Bug(
        Mutation(f"{CONTEXT}:ContextAttention._in_pieces", "rule.chunked", "False"), [ON_RING, ALLGATHER], spec=CHUNK
    ),
    "a ring counts the chunks of a document from the start of the sequence": Bug(
        Mutation(f"{PLAN}:_in_chunks", "divmod(at - starts[span.document], chunk)", "divmod(at, chunk)"),
        [ZIGZAG, ON_RING],
        spec=CHUNK,
        documents=True,
    ),
    "a cache reads a window instead of a chunk": UnitBug(
        Mutation(f"{CACHE}._n_read", "start % self.window", "min(start, self.window - 1)"),
        CONTINUATION,
        (models.CHUNKS,),
    ),
}
SCALE: dict[str, AnyBug] = {
    "queries have no temperature": UnitBug(Mutation(BLOCK, "self.tempered is not None", "False"), LOGITS, ("llama4",)),
    "temperatures rise one position late": UnitBug(
        Mutation("shardwright.model.transformer:query_temperature", "positions_T + 1", "positions_T"),
        LOGITS,
        ("llama4",),
    ),
    "a rank of cp has the temperatures of the first tokens": Bug(
        Mutation(BLOCK, "_embedded(positions_T, documents)", "torch.arange(x_BTD.shape[1])"),
        [ZIGZAG, ON_RING],
        spec=TEMPERED,
    ),
    "layers that rotate nothing have norms without weight": UnitBug(
        Mutation(
            "shardwright.model.sizes:ModelSizes.norms_heads", "self.qk_norm_weight or self.rotates(layer)", "True"
        ),
        LOGITS,
        ("llama4",),
    ),
    "the weight of an expert multiplies its output instead of its input": UnitBug(
        Mutation("shardwright.model.moe:MoE.forward", "self.router.moe.scale_input", "False"), LOGITS, ("llama4",)
    ),
    "the gradient of a scaled input is not scaled": UnitBug(
        Mutation(
            f"{EXPERTS}:_Dispatch.backward",
            "_weighted_sum(grads[0], weights_NK, slots_NK, kept_NK)",
            "_weighted_sum(grads[0], None, slots_NK, kept_NK)",
        ),
        LAYER,
        ("scaled inputs", "swiglu"),
    ),
    "a router learns nothing from the inputs that it scales": UnitBug(
        Mutation(
            f"{EXPERTS}:_Dispatch.backward",
            "_weight_gradient(grads[0], _copied(x_ND, order_R, slots_NK), weights_NK, slots_NK)",
            "torch.zeros_like(weights_NK)",
        ),
        LAYER,
        ("scaled inputs", "swiglu"),
    ),
}
FILES: dict[str, AnyBug] = {
    "layers of all tokens without a pattern have the window": UnitBug(
        Mutation("shardwright.hugging_face.windows:pattern", "[layer for layer in range(n) if is_global[layer]]", "[]"),
        "tests/hugging_face/test_published.py:test_kinds_of_layers_without_a_pattern_are_read_and_written_one_by_one",
        ("olmo3-7b",),
    ),
    "the high half of a byte of mxfp4 comes first": UnitBug(
        Mutation(
            "shardwright.hugging_face.reader:from_mxfp4", "(blocks & 15, blocks >> 4)", "(blocks >> 4, blocks & 15)"
        ),
        "tests/hugging_face/test_mxfp4.py:numbers_are_those_of_transformers",
    ),
}
