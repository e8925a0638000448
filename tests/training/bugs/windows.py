"""Windows, sinks and soft caps: bugs of masks, of layers' numbers, of what is sent, and of the cache."""

from shardwright.layout.layout import Layout
from tests.mutation import Mutation
from tests.training.bugs.bug import ALLGATHER, CONTEXT, ON_RING, ULYSSES, ZIGZAG, AnyBug, Bug, UnitBug

LOGITS = "tests/hugging_face/test_families.py:test_logits_are_those_of_transformers"
FORMULA = "tests/model/test_piece_attention.py:outputs_and_gradients_are_those_of_the_formula"
SOME_ROWS = "tests/model/test_piece_attention.py:few_rows_at_a_time_change_nothing"
FLEX, IN_KERNEL = "shardwright.model.flex", "tests/model/test_flex.py"
CAPPED = f"{IN_KERNEL}:outputs_and_gradients_are_those_of_attention_in_pieces"
SQUARES = f"{IN_KERNEL}:tables_name_every_square_with_a_score"
PLAN, PIECES = "shardwright.split.documents", "shardwright.model.pieces:AttentionPiece"
BLOCKS, ATTENTION = "shardwright.model.blocks", "shardwright.model.piece_attention:PieceAttention"
CACHE = "shardwright.generation.cache:RuledLayerCache"
WINDOW = {"window": 4, "n_layers": 2}

MASK: dict[str, AnyBug] = {
    "a window has one token more": UnitBug(
        Mutation(f"{BLOCKS}:_mask", "piece.shift - piece.window + 1", "piece.shift - piece.window"), FORMULA, (6,)
    ),
    "a window of FlexAttention has one token more": UnitBug(
        Mutation(
            "shardwright.model.pieces:first_keys",
            "np.arange(len(first_N)) - window + 1",
            "np.arange(len(first_N)) - window",
        ),
        CAPPED,
        (6,),
    ),
    "a query of FlexAttention reads the key after it": UnitBug(
        Mutation(f"{FLEX}:block_mask", "key <= query", "key <= query + 1"), CAPPED, (6,)
    ),
    "the cap of FlexAttention does not divide the score": UnitBug(
        Mutation(f"{FLEX}:soft_cap", "torch.tanh(score / softcap)", "torch.tanh(score)"), CAPPED, (6,)
    ),
    "a square of FlexAttention is full for its first query alone": UnitBug(
        Mutation(f"{FLEX}:squares", "column >= high[:, None]", "column >= low[:, None]"), SQUARES, ((700,),)
    ),
    "FlexAttention leaves out a square in which one key is read": UnitBug(
        Mutation(f"{FLEX}:squares", "column + SQUARE > low[:, None]", "column + SQUARE > low[:, None] + 1"),
        SQUARES,
        ((128, 128, 256),),
    ),
    "the backward pass of FlexAttention has the squares of the forward pass": UnitBug(
        Mutation(f"{FLEX}:block_mask", "_ordered(seen_SS.T)", "_ordered(seen_SS)"), SQUARES, ((700,),)
    ),
    "rows of a cut piece lose their first key": UnitBug(
        Mutation(f"{PIECES}.cut", "row + self.shift - self.window + 1", "row + self.shift - self.window + 2"),
        FORMULA,
        (6,),
    ),
    "some rows of scores read the next key": UnitBug(
        Mutation(f"{BLOCKS}:_some_rows", "_mask(part, q_BHTC.device) if part.hides_late else False", "False"), SOME_ROWS
    ),
    "keys have the gradients of the last rows alone": UnitBug(
        Mutation(f"{BLOCKS}:_rows_gradient", "dk_BKSC[:, :, columns] += dk", "dk_BKSC[:, :, columns] = dk"), SOME_ROWS
    ),
    "every layer has the window of the first": UnitBug(
        Mutation("shardwright.model.transformer:_attention", "Attention(spec, layer)", "Attention(spec, 0)"),
        LOGITS,
        ("gemma2",),
    ),
    "windowed layers rotate as others do": UnitBug(
        Mutation("shardwright.model.transformer:Block.forward", "rotary_2TC[self.table]", "rotary_2TC[0]"),
        LOGITS,
        ("gemma3",),
    ),
    "a ring sends one key too few for a window": Bug(
        Mutation(
            f"{PLAN}:_within_window",
            "firsts = [max(k.start, q.start - window + 1) for q in queries[1] if q.start >= k.start]",
            "firsts = [max(k.start, q.start - window + 2) for q in queries[1] if q.start >= k.start]",
        ),
        [ON_RING],
        spec=WINDOW,
        crashes=True,
    ),
    "late queries of a window miss a key of another rank": Bug(
        Mutation(f"{PLAN}:_within_window", "k.stop + window - 1 - q.start", "k.stop + window - 2 - q.start"),
        [ZIGZAG, ALLGATHER],
        spec=WINDOW,
    ),
    "a ring attends to all keys": Bug(
        Mutation(f"{CONTEXT}:ContextAttention._in_pieces", "rule.window", "0"), [ON_RING, ALLGATHER], spec=WINDOW
    ),
    "ulysses attends to all keys": Bug(
        Mutation(
            f"{CONTEXT}:ContextAttention._over_ring",
            "attend(q_BTHC, k_BTKC, v_BTKC, documents, rule)",
            "attend(q_BTHC, k_BTKC, v_BTKC, documents)",
        ),
        [ULYSSES],
        spec=WINDOW,
    ),
    "a key takes the place of one that a draft's replacement reads": UnitBug(
        Mutation(f"{CACHE}.__init__", "self.window + cache.n_ahead", "self.window"),
        "tests/generation/test_speculative.py:a_draft_changes_no_greedy_token",
        ("windows",),
    ),
    "new keys are stored before those in their places are read": UnitBug(
        Mutation(
            f"{CACHE}.attend_and_write",
            "lengths, outputs = _lengths(self.cache.batch), []",
            "self.write(k_NKC, v_NKC)\nlengths, outputs = _lengths(self.cache.batch), []",
        ),
        "tests/generation/test_engine.py:a_long_continuation_is_that_of_the_whole_sequence",
    ),
}
SHARD: dict[str, AnyBug] = {
    "ulysses takes the sinks of the first heads": Bug(
        Mutation(f"{CONTEXT}:ContextAttention.__call__", "self.ulysses.rank()", "0"),
        [ULYSSES],
        spec={"attention_sinks": True},
    ),
    "a rank of tp has the sinks of the first heads": Bug(
        Mutation(
            "shardwright.model.attention:Attention._rule",
            "self.sinks.to_local()",
            "self.sinks.full_tensor()[: self.sinks.to_local().shape[0]]",
        ),
        [Layout(tp=2, sequence_parallel=False, dp_shard=2, zero=3)],
        spec={"attention_sinks": True},
    ),
}
SCALE: dict[str, AnyBug] = {
    "a sink has the gradient of a score with a value": UnitBug(
        Mutation(f"{ATTENTION}.backward", "(sinks_H.to(wide)[:, None] - lse_1HN).exp_()", "(lse_1HN * 0 + 1)"),
        FORMULA,
        (0,),
    ),
    "a sink is forgotten where a rank has several pieces": Bug(
        Mutation(f"{ATTENTION}.forward", "sinks_H is not None", "sinks_H is not None and len(pieces) == 1"),
        [ON_RING, ALLGATHER],
        spec={"attention_sinks": True},
    ),
    "a sink counts once for every step of a ring": Bug(
        Mutation(
            f"{ATTENTION}.forward",
            "k_1KMC, v_1KMC = map(_heads_first, held_2MKC)",
            "k_1KMC, v_1KMC = map(_heads_first, held_2MKC)\nif sinks_H is not None and step:\n"
            "    merge(o_1HNC, lse_1HN, torch.zeros_like(o_1HNC), sinks_H.to(wide)[:, None].expand_as(lse_1HN))",
        ),
        [ON_RING, ZIGZAG],
        spec={"attention_sinks": True},
    ),
    "capped scores have the gradient of uncapped scores": UnitBug(
        Mutation(f"{BLOCKS}:_dense_gradient", "slope is None", "True"), FORMULA, (0,)
    ),
    "capped logits have the gradient of uncapped logits": Bug(
        Mutation("shardwright.parallel.loss:_capped", "factor is not None", "False"),
        [Layout(tp=2, loss_chunk_tokens=8)],
        spec={"logit_softcap": 0.1},
    ),
    "chunks of logits have no cap": Bug(
        Mutation(
            "shardwright.parallel.loss:ChunkedLoss.__init__",
            "partial(_capped, of_chunk, softcap) if softcap else of_chunk",
            "of_chunk",
        ),
        [Layout(tp=2, loss_chunk_tokens=8)],
        spec={"logit_softcap": 0.1},
    ),
    "Gemma 2 scales scores by the inverse of the number": UnitBug(
        Mutation("shardwright.hugging_face.gemma:_complete_shared", "scalar ** -0.5", "scalar ** -1.0"),
        LOGITS,
        ("gemma2",),
    ),
}
