"""Bugs of padding in mixtures of experts: in losses, counts and capacity, and on each way of sharding tokens."""

from dataclasses import replace

from shardwright.layout.layout import Layout
from tests.mutation import Mutation
from tests.training.bugs.bug import (
    FEW_PLACES,
    ON_RING,
    ONE,
    PASSES,
    PP,
    ROUTER,
    SP,
    SP_EP,
    STAGES,
    TENSOR,
    TRAINER,
    ZERO_2,
    ZIGZAG,
    AnyBug,
    Bug,
    UnitBug,
)

_ANY_ROUTER, _DECODER = "shardwright.model.moe:Router", "shardwright.model.transformer:Transformer"
_MOE = replace(FEW_PLACES, aux_scope="sequence")


def _bug(function: str, before: str, after: str, *layouts: Layout, mtp_modules: int = 0) -> Bug:
    spec = {"moe": _MOE, "mtp_modules": mtp_modules}
    return Bug(Mutation(function, before, after), list(layouts), spec=spec, padded=True)


MASK: dict[str, AnyBug] = {
    "padding has a part in the balance loss": _bug(
        f"{_ANY_ROUTER}.losses", "aux_loss(scores_BTE, load, aux_weights_BT)", "aux_loss(scores_BTE, load)", ONE, SP_EP
    ),
    "padding has a part in the z-loss": _bug(
        f"{_ANY_ROUTER}.losses", "z_loss(logits_BTE, z_weights_BT)", "z_loss(logits_BTE)", ONE, ZIGZAG
    ),
    "padding counts for the load and the bias": _bug(
        f"{_ANY_ROUTER}.forward",
        "count(experts_BTK, moe.n_experts, real_BT)",
        "count(experts_BTK, moe.n_experts)",
        ONE,
        SP_EP,
    ),
    "the capacity of a padded sequence is that of its whole length": _bug(
        f"{_ANY_ROUTER}.capacity", "real is None", "True", ONE, ZIGZAG
    ),
    "the capacity of a padded sequence on several ranks is that of its whole length": _bug(
        f"{ROUTER}.keep", "self.capacity(n_tokens, real)", "self.capacity(n_tokens, None)", ZIGZAG, SP_EP
    ),
    "every token shard takes its tokens for the first ones of the sequence": _bug(
        f"{TENSOR}:TensorAxis.own_tokens", "self.group.rank()", "0", SP, SP_EP
    ),
    "every rank of cp takes its tokens for the first ones of the sequence": _bug(
        "shardwright.model.transformer:Block.forward",
        "routed = ffn_keys_B if self.ffn.drawn else None, positions_T, real",
        "routed = ffn_keys_B if self.ffn.drawn else None, torch.arange(x_BTD.shape[1]), real",
        ZIGZAG,
        ON_RING,
    ),
    "the z-loss is a mean over the real tokens of each data rank": _bug(
        f"{TRAINER}._real_tokens", "self.model.sum_over_samples(total)", "total", ZERO_2
    ),
    "the z-loss takes the sequences of a data rank for the global batch": _bug(
        f"{TRAINER}._real_tokens", "self.model.layout.data_ranks", "1", ZERO_2
    ),
    "the stages of a pipeline do not know which tokens are padding": _bug(
        f"{STAGES}:StageModel.forward",
        "self.run_layers(x_BTD, positions_T, random_keys_B, documents, real)",
        "self.run_layers(x_BTD, positions_T, random_keys_B, documents)",
        PP,
    ),
    "modules of multi-token prediction do not know which tokens are padding": _bug(
        f"{_DECODER}.predict_ahead",
        "self._read_by_blocks(x_BTD, positions_T, documents, real)",
        "self._read_by_blocks(x_BTD, positions_T, documents, None)",
        ONE,
        mtp_modules=1,
    ),
    "experts do not know which tokens are the padding after pairs of answers": Bug(
        Mutation(f"{PASSES}:ForwardBackward._document_microbatches", "real_A[i]", "None"),
        [ONE, SP_EP],
        spec={"moe": _MOE},
        preference="dpo",
    ),
    "sequences of pairs of answers are taken for full": UnitBug(
        Mutation(
            "shardwright.data.samples:PairSamples.__init__",
            "super().__init__(split, seq_len, padded=True)",
            "super().__init__(split, seq_len, padded=False)",
        ),
        "tests/data/test_chat.py:test_samples_of_pairs_have_whole_pairs_of_which_the_answers_count",
    ),
    "modules of multi-token prediction read padding": _bug(
        f"{TRAINER}._ahead", "tokens_ABT.masked_fill(padding_ABT, BEYOND)", "tokens_ABT", ONE, mtp_modules=1
    ),
}
