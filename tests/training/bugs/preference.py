"""Bugs of preference training: of the loss of a pair, of its reference, and of its sums over ranks."""

from tests.mutation import Mutation
from tests.training.bugs.bug import ONE, PP, SP, TRAINER, ULYSSES, ZERO_0, ZERO_3, ZIGZAG, AnyBug, Bug, UnitBug

_LOSS = "shardwright.parallel.preference:pair_losses"
_PAIRS = "shardwright.parallel.preference:PairLoss"

SCALE: dict[str, AnyBug] = {
    "the rejected answer of a pair is preferred": Bug(
        Mutation(_LOSS, "chosen_P - rejected_P", "rejected_P - chosen_P"), [ONE, SP], preference="dpo"
    ),
    "the loss of a pair has no beta": Bug(
        Mutation(_LOSS, "section.beta * margin_P - gamma", "margin_P - gamma"), [ONE], preference="dpo"
    ),
    "the loss of a pair has no reference": Bug(
        Mutation(_LOSS, "policy_D - reference_D", "policy_D"), [ONE, PP], preference="dpo"
    ),
    "the log-probability of an answer is a mean where it is a sum": Bug(
        Mutation(_LOSS, "section.kind != 'dpo'", "True"), [ONE], preference="dpo"
    ),
    "the log-probability of an answer is a sum where it is a mean": Bug(
        Mutation(_LOSS, "section.kind != 'dpo'", "False"), [ONE, ZERO_3], preference="simpo"
    ),
    "a pair whose answers are equally probable is accurate": UnitBug(
        Mutation(_LOSS, "margin_P > 0", "margin_P >= 0"),
        "tests/training/test_preference.py:test_a_pair_without_a_margin_is_not_accurate",
    ),
    "the loss of pairs is averaged per rank": Bug(
        Mutation(f"{TRAINER}._loss", "self.model.sum_over_samples(n_pairs)", "2 * n_pairs"),
        [ZERO_0, ZERO_3],
        preference="dpo",
    ),
    "every rank of a sequence reports the loss of its pairs": Bug(
        Mutation(f"{TRAINER}._pair_loss", "at['cp_ring'] == at['cp_ulysses'] == 0", "True"),
        [ZIGZAG, ULYSSES],
        preference="dpo",
    ),
}
REDUCTION: dict[str, AnyBug] = {
    "the log-probability of an answer has the tokens of one rank alone": Bug(
        Mutation(f"{_PAIRS}.log_probs", "_SumOverContext.apply(sums, group)", "sums"),
        [ZIGZAG, ULYSSES],
        preference="ipo",
    ),
    "the gradient of an answer is summed over the ranks of its tokens": Bug(
        Mutation(
            "shardwright.parallel.preference:_SumOverContext.backward", "return dtotal, None", "return 2 * dtotal, None"
        ),
        [ZIGZAG],
        preference="dpo",
    ),
}
MASK: dict[str, AnyBug] = {
    "the targets of an answer are counted on one rank alone": Bug(
        Mutation(
            "shardwright.training.forward_backward:ForwardBackward._pairs",
            "(targets_BT != IGNORE).flatten().double()",
            "(targets_BT != IGNORE).flatten().double() * (torch.arange(targets_BT.numel()) % targets_BT.shape[1]"
            " < held_BT.shape[1])",
        ),
        [ZIGZAG],
        preference="simpo",
    ),
}
