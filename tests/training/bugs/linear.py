"""Linear attention and gated attention: bugs of decays, states, the convolution, the gates and the shards of heads."""

from shardwright.model.linear_sizes import LinearAttentionSpec
from tests.mutation import Mutation
from tests.training.bugs.bug import ON_RING, TP, ZIGZAG, AnyBug, Bug, UnitBug

LOGITS = "tests/hugging_face/test_families.py:test_logits_are_those_of_transformers"
FORMULA = "tests/model/test_linear_attention.py:outputs_and_gradients_are_those_of_the_formula"
TOKENS = "tests/generation/test_engine.py:tokens_of_linear_layers_are_those_without_a_cache"
MODEL = "shardwright.model.linear_attention"
NET, RULE, IN_DOCUMENTS = f"{MODEL}:GatedDeltaNet", f"{MODEL}:delta_chunks", f"{MODEL}:_within_documents"
REPLACED = "tests/generation/test_speculative.py:logits_after_replaced_tokens_are_those_without_a_cache"
OVER_CP = "shardwright.parallel.linear_attention"
PIECES, CONTEXT_SCAN = f"{OVER_CP}:ContextDeltaNet", f"{OVER_CP}:_PieceScan"
CACHE = "shardwright.generation.cache:CachedDeltaNet"
DOCUMENTS = ((5, 6), (1, 10))
SIZES = LinearAttentionSpec(n_k_heads=2, n_v_heads=4, k_dim=6, v_dim=5, conv_width=3, full_interval=2)
LINEAR = {"linear_attention": SIZES, "n_layers": 2}

SCALE: dict[str, AnyBug] = {
    "a state has the decay of the next head": UnitBug(
        Mutation(f"{NET}.chunks", "a_log_H.exp()", "a_log_H.roll(1).exp()"), FORMULA, (None, 4)
    ),
    "a state decays before and after a token": UnitBug(
        Mutation(f"{NET}.chunks", "-a_log_H.exp()", "-2 * a_log_H.exp()"), FORMULA, (None, 4)
    ),
    "a value head reads the keys of another group": UnitBug(
        Mutation(f"{NET}.chunks", "x.repeat_interleave(group, 2)", "x.repeat(1, 1, group, 1)"), FORMULA, (None, 4)
    ),
    "a head is gated before its norm": UnitBug(
        Mutation(
            f"{NET}.gated",
            "normed_BTHV = F.rms_norm(o_BHTV.transpose(1, 2), (self.v_dim,), norm_V.to(o_BHTV.dtype), self.norm.eps)\n"
            "return normed_BTHV.flatten(-2) * F.silu(z_BTF)",
            "gated = o_BHTV.transpose(1, 2) * F.silu(z_BTF).unflatten(-1, (-1, self.v_dim))\n"
            "return F.rms_norm(gated, (self.v_dim,), norm_V, self.norm.eps).flatten(-2)",
        ),
        FORMULA,
        (None, 4),
    ),
    "the map of states does not decay": Bug(
        Mutation(f"{MODEL}:transition", "state_BHKX * passed[:, :, n]", "state_BHKX"), [ZIGZAG], spec=LINEAR
    ),
    "the states before a piece are added without its map": Bug(
        Mutation(f"{PIECES}.states_before", "map_BHKX[..., :k_dim] @ state_BHKV", "state_BHKV"), [ZIGZAG], spec=LINEAR
    ),
    "the gradient of a state passes a piece by the map itself": Bug(
        Mutation(f"{PIECES}.gradients_after", "map_BHKX[..., :k_dim].mT", "map_BHKX[..., :k_dim]"),
        [ZIGZAG],
        spec=LINEAR,
    ),
}
OFF_BY_ONE: dict[str, AnyBug] = {
    "the convolution is shifted by one token": UnitBug(
        Mutation(f"{MODEL}:convolve", "filter_F1W[:, 0, n_before - ago]", "filter_F1W[:, 0, n_before - ago + 1]"),
        FORMULA,
        (None, 64),
    ),
}
MASK: dict[str, AnyBug] = {
    "the convolution reads the previous document": UnitBug(
        Mutation(f"{MODEL}:convolve", "earlier_BTF * same_BT.unsqueeze(-1)", "earlier_BTF"), FORMULA, (DOCUMENTS, 4)
    ),
    "a document reads the state of the one before, from an earlier chunk": UnitBug(
        Mutation(IN_DOCUMENTS, "document_B1NC == before_B1N1", "1"), FORMULA, (DOCUMENTS, 4)
    ),
    "a document reads tokens of the one before, of its own chunk": UnitBug(
        Mutation(IN_DOCUMENTS, "later_CC | others", "later_CC"), FORMULA, (DOCUMENTS, 64)
    ),
    "a piece continues the state of a document that ended before it": Bug(
        Mutation(IN_DOCUMENTS, "first_B1[:, None, None]", "document_B1NC[:, :, :1, :1]"),
        [ON_RING],
        spec=LINEAR,
        documents=True,
    ),
    "the convolution reads zeros before a piece": Bug(
        Mutation(
            f"{PIECES}.tails",
            "all_BUF[:, p * width : p * width + n_before]",
            "0 * all_BUF[:, p * width : p * width + n_before]",
        ),
        [ON_RING],
        spec=LINEAR,
    ),
    "tokens of an ended document stay in the state": UnitBug(
        Mutation(IN_DOCUMENTS, "document_B1NC == ends_B1N1", "1"), FORMULA, (DOCUMENTS, 4)
    ),
}
ORDER: dict[str, AnyBug] = {
    "a chunk decays the state by its first token alone": UnitBug(
        Mutation(RULE, "from_start_BHNC[..., -1:].unsqueeze(-1)", "from_start_BHNC[..., :1].unsqueeze(-1)"),
        FORMULA,
        (None, 4),
    ),
    "a token does not read its own value": UnitBug(
        Mutation(RULE, "q @ k.mT * decay_BHNCC", "(q @ k.mT * decay_BHNCC).tril(-1)"), FORMULA, (None, 64)
    ),
    "pieces are in the order of ranks": Bug(
        Mutation(f"{PIECES}.__init__", "gathered.index(piece)", "piece"), [ZIGZAG], spec=LINEAR
    ),
    "the gradients of states have the order of the backward pass": Bug(
        Mutation(f"{PIECES}.gradients_after", "gradients[::-1]", "gradients"), [ON_RING], spec=LINEAR
    ),
    "a rank's pieces have the order of sequences": Bug(
        Mutation(
            f"{PIECES}.own_rows",
            "torch.stack([of_pieces[piece] for piece in self.own], 1)",
            "torch.stack([of_pieces[piece] for piece in self.own], 0)",
        ),
        [ZIGZAG],
        spec=LINEAR,
    ),
    "every layer is linear": UnitBug(
        Mutation("shardwright.model.sizes:ModelSizes.is_linear", "(layer + 1) % linear.full_interval == 0", "False"),
        "tests/model/test_linear_attention.py:test_layers_are_linear_except_every_nth_layer",
    ),
    "the gate of full attention is the query itself": UnitBug(
        Mutation("shardwright.model.attention:Attention.forward", "gate[0].flatten(-2)", "q_BTHC.flatten(-2)"),
        LOGITS,
        ("qwen3-next",),
    ),
}
STALE: dict[str, AnyBug] = {
    "a sequence starts with the state of the last one in its row": UnitBug(
        Mutation(f"{CACHE}.__call__", "segment.start == 0", "segment.start < 0"), TOKENS
    ),
    "tokens that may be replaced are those of an earlier pass": UnitBug(
        Mutation(f"{CACHE}._run_again", "kept_x[row, : x.shape[1]] = x", "pass"), REPLACED
    ),
    "the first of the kept tokens run again, whichever was replaced": UnitBug(
        Mutation(f"{CACHE}._run_again", "x[row, :n_again]", "x[row, n_ahead - n_again :]"), REPLACED
    ),
    "a state is not stored after a token": UnitBug(Mutation(f"{CACHE}._advance", "tensor[rows] = x", "pass"), TOKENS),
}
REDUCTION: dict[str, AnyBug] = {
    "the gradient of a state is not sent back": Bug(
        Mutation(f"{CONTEXT_SCAN}.backward", "(dy_RLF, dafter_RHKV)", "(dy_RLF, 0 * dafter_RHKV)"),
        [ON_RING],
        spec=LINEAR,
    ),
    "the gradient of a tail is not sent back": Bug(
        Mutation(f"{PIECES}.add_gradients_of_tails", "dqkvz_RLF[:, -width:] += dlast_RmF", "pass"),
        [ON_RING],
        spec=LINEAR,
    ),
}
SHARD: dict[str, AnyBug] = {
    "norms of heads have the gradient of a rank's heads alone": Bug(
        Mutation("shardwright.split.tensor:summed_over", "row.split == 'per_head'", "row.name == 'attention.q_norm'"),
        [TP],
        spec=LINEAR,
    ),
    "beta and decay of heads are swapped": UnitBug(
        Mutation(
            f"{NET}.chunks",
            "b_BTH, a_BTH = (x.flatten(-2) for x in ba_BTGF.chunk(2, -1))",
            "a_BTH, b_BTH = (x.flatten(-2) for x in ba_BTGF.chunk(2, -1))",
        ),
        FORMULA,
        (None, 4),
    ),
}
