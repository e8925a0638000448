"""Bugs of documents in packed sequences: of their boundaries, of the mask, of positions that restart."""

from shardwright.layout.layout import Layout
from tests.mutation import Mutation
from tests.training.bugs.bug import (
    ALLGATHER,
    CONTEXT,
    ON_RING,
    PP,
    STAGE,
    TRAINER,
    ULYSSES,
    ZERO_0,
    ZIGZAG,
    AnyBug,
    Bug,
    UnitBug,
)

_DOCUMENTS, _PLAN = "shardwright.parallel.documents", "shardwright.split.documents"

MASK: dict[str, AnyBug] = {
    "the all-gather of keys loses the mask of documents": Bug(
        Mutation(
            f"{CONTEXT}:ContextAttention._over_ring",
            "documents is not None",
            "documents is not None and self.method != 'allgather'",
        ),
        [ALLGATHER],
        documents=True,
    ),
    "ulysses loses the mask of documents": Bug(
        Mutation(
            f"{CONTEXT}:ContextAttention._over_ring",
            "attend(q_BTHC, k_BTKC, v_BTKC, documents, rule)",
            "attend(q_BTHC, k_BTKC, v_BTKC, None, rule)",
        ),
        [ULYSSES],
        documents=True,
    ),
    "a stage masks by the documents of the micro-batch before": Bug(
        Mutation(
            f"{STAGE}._forward",
            "model(x, *microbatch.read_by_model)",
            "model(x, *microbatch._replace(documents=self.microbatches[i - 1].documents).read_by_model)",
        ),
        [PP],
        documents=True,
    ),
    "the recomputation masks by documents in the reverse order": Bug(
        Mutation(
            "shardwright.model.transformer:Block.forward",
            "self.attention(normed_BTD, rotary_2TC, documents, *of_queries)",
            "self.attention(normed_BTD, rotary_2TC, documents"
            " if torch._C._current_graph_task_id() < 0"
            " else Documents(tuple(each[::-1] for each in documents.lengths), documents.positions_BT))",
        ),
        [Layout(cp=2, recompute="full")],
        documents=True,
    ),
    "positions do not restart in the second half of a rank's tokens": Bug(
        Mutation(
            f"{TRAINER}._document_microbatches",
            "restarted(lengths).gather(1, held_BT)",
            "torch.cat([restarted(lengths).gather(1, held_BT)[:, :3], held_BT[:, 3:]], 1)",
        ),
        [ZIGZAG],
        documents=True,
    ),
    "a block without keys is merged with a log-sum-exp of 0": Bug(
        Mutation(
            "shardwright.model.piece_attention:PieceAttention.forward",
            "k_1KMC, v_1KMC = map(_heads_first, held_2MKC)",
            "k_1KMC, v_1KMC = map(_heads_first, held_2MKC)\n"
            "if not pieces[step]:\n"
            "    merge(o_1HNC, lse_1HN, torch.zeros_like(o_1HNC), torch.zeros_like(lse_1HN))",
        ),
        [ON_RING],
        documents=True,
    ),
    "a data rank has the documents of the first": Bug(
        Mutation(
            "shardwright.verification.rank:local_batch", "documents_B[first : first + block]", "documents_B[:block]"
        ),
        [ZERO_0],
        documents=True,
    ),
    "a query leaves out the keys right before its own": Bug(
        Mutation(f"{_PLAN}:_between", "k.start < span.start", "k.stop < span.start"), [ON_RING], documents=True
    ),
    "gradients that come back are added to the first document": Bug(
        Mutation(f"{_DOCUMENTS}:_GradientReturns.finish", "first += tokens", "first += 0"), [ZIGZAG], documents=True
    ),
    "the boundary of a document is one token late": UnitBug(
        Mutation(
            "shardwright.data.shards:TokenSplit.document_starts",
            "index[low:high].astype(np.int64) + first",
            "index[low:high].astype(np.int64) + first + 1",
        ),
        "tests/data/test_documents.py:test_boundaries_are_those_of_the_documents_that_were_written",
    ),
    "every sequence of a micro-batch has the documents of the first": UnitBug(
        Mutation(
            "shardwright.data.batches:_read",
            "samples.documents(i)",
            "samples.documents(int(indices_AB[place[0], 0]))",
        ),
        "tests/data/test_documents.py:test_boundaries_are_those_of_the_documents_that_were_written",
    ),
}
