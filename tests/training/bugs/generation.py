"""Bugs of generation, by family: the cache, sampling, speculative decoding."""

from shardwright.generation.sampling import Sampling
from tests.generation.models import DRAWN, GREEDY, GROUPED, LATENT
from tests.mutation import Mutation
from tests.training.bugs.bug import UnitBug

CACHE, BATCHER = "shardwright.generation.cache", "shardwright.generation.continuous:Batcher"
SAMPLING, SPECULATIVE = "shardwright.generation.sampling", "shardwright.generation.speculative:Speculative"
_NO_TOKEN = "tests/generation/test_engine.py:test_the_cache_changes_no_token"
_ON_RANKS = "tests/generation/test_engine.py:test_keys_of_another_rank_are_seen"
_COUNTS = "tests/generation/test_speculative.py:test_the_draft_proposes_what_it_would_without_a_cache"
_DISTRIBUTION = "tests/generation/test_speculative.py:test_a_draft_does_not_change_the_distribution"

OTHER_RANK = Mutation(
    f"{CACHE}:CachedAttention.__call__",
    "x[0, :n]",
    "torch.cat(torch.distributed.nn.functional.all_gather(x[0, :n].contiguous()), 1)"
    ".chunk(2, 1)[1 - torch.distributed.get_rank()]",
)

GIVEN_BACK = Mutation("shardwright.generation.engine:WholeEngine.__init__", "configure_malloc()", "None")


def _cache_bug(function: str, before: str, after: str, spec: object = GROUPED, sampling: Sampling = GREEDY) -> UnitBug:
    return UnitBug(Mutation(function, before, after), _NO_TOKEN, given=(spec, sampling))


SCALE = {
    "absorbed latent attention is scaled by the width of the latent vector": _cache_bug(
        "shardwright.generation.cache:CachedLatentAttention._absorbed", "q_NHC.shape[-1] ** -0.5", "None", LATENT
    ),
    "a rejected proposal is replaced by a draw from the target's whole distribution": UnitBug(
        Mutation(f"{SPECULATIVE}.check", "(p_V - q_V).clamp(min=0)", "p_V"), _DISTRIBUTION
    ),
    "every proposal of the draft model is accepted": UnitBug(
        Mutation(f"{SPECULATIVE}.check", "u_4[ACCEPTED] * q_V[token] >= p_V[token]", "False"), _DISTRIBUTION
    ),
}
SERVING = {
    "a pass of generate faults in the memory that the one before gave back": UnitBug(
        GIVEN_BACK,
        "tests/generation/test_engine.py:test_a_pass_keeps_the_memory_of_the_one_before",
        put_in_there=True,
    )
}
SHARD = {"the cache has the kv heads of another rank of tp": UnitBug(OTHER_RANK, _ON_RANKS, put_in_there=True)}
ORDER = {
    "draws follow the row of the batch instead of the prompt": _cache_bug(
        f"{BATCHER}.next_tokens", "[s.prompt for s in group]", "[each.slot for each in group]", sampling=DRAWN
    ),
    "draws of one sequence repeat at every position": _cache_bug(
        f"{BATCHER}.next_tokens", "[len(s.tokens) for s in group]", "[0 for each in group]", sampling=DRAWN
    ),
}
STALE = {
    "the draft's cache keeps a rejected token": UnitBug(
        Mutation(f"{SPECULATIVE}.__call__", "min(count, len(proposal.tokens))", "len(proposal.tokens)"), _COUNTS
    ),
}
MASK = {
    "a short sequence attends to the positions of a longer one in the batch": _cache_bug(
        "shardwright.generation.batch:RaggedBatch.decode_mask", "min(stops) == max(stops)", "True"
    ),
    "a proposal attends to the one after it": UnitBug(
        Mutation(f"{CACHE}:_causal_mask", "piece.shift", "piece.shift + 1"),
        "tests/generation/test_speculative.py:a_draft_changes_no_greedy_token",
        given=("grouped",),
    ),
}
OFF_BY_ONE = {
    "keys and values are cached one position early": _cache_bug(
        f"{CACHE}:LayerCache.write", "cache.batch.starts", "cache.batch.starts - 1"
    ),
    "positions of rope are one too high in decoding": _cache_bug(
        "shardwright.generation.engine:WholeEngine._logits",
        "batch.positions",
        "[position + (not batch.is_prefill) for position in batch.positions]",
    ),
    "top_p leaves out the token that reaches it": UnitBug(
        Mutation(
            f"{SAMPLING}:Sampling.probabilities",
            "sorted_NV.cumsum(-1) - sorted_NV >= self.top_p",
            "sorted_NV.cumsum(-1) >= self.top_p",
        ),
        "tests/generation/test_sampling.py:test_top_p_keeps_the_most_probable_tokens_that_reach_it",
    ),
}
