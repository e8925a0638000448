"""Proves that bugs which shipped elsewhere in silence do not pass here: put into our code, parity sees each.

Numbers are those of the list of known silent bugs: 1 and 2 normalise the loss over the wrong tokens, 6 takes the mean
twice, 26 lets a forward pass run on parameters from before the update. 18 is in tests/data, 23 and 24 in
tests/train/test_checkpoint.py.
"""

import pytest
import torch

from shardloom.layout import Layout
from tests.distributed import run_ranks
from tests.mutation import mutated
from tests.train.worlds import one_process, train_ranks, worst_error

TRAINER, DATA = "shardloom.train.step:Trainer", "shardloom.parallel.data"
NORMALISED = "self.loss_sum(logits_BTV, targets_BT) / n_targets"
ZERO_0, ZERO_1, ZERO_2, ZERO_3 = (
    Layout(dp_replicate=2),
    Layout(dp_shard=2, zero=1),
    Layout(dp_shard=2, zero=2),
    Layout(dp_shard=2, zero=3),
)
HYBRID = Layout(dp_replicate=2, dp_shard=2, zero=2)

BUGS = {
    "1: loss averaged per microbatch": (
        (TRAINER, "forward_backward", NORMALISED, NORMALISED.replace("n_targets", "(targets_BT != -100).sum() / 6")),
        [ZERO_0, ZERO_1, ZERO_2, ZERO_3],
    ),
    "2: loss averaged per rank": (
        (TRAINER, "forward_backward", "dist.all_reduce(n_targets, group=self.model.data_group)", "n_targets *= 2"),
        [ZERO_0, ZERO_1, ZERO_2, ZERO_3],
    ),
    "6: the mean is taken again by FSDP": (
        ("shardloom.parallel.apply", "shard", "set_gradient_divide_factor(1.0)", "set_gradient_divide_factor(2.0)"),
        [ZERO_1, ZERO_2, ZERO_3],
    ),
    "6: the mean is taken again by DDP": (
        (DATA, "_sum_bucket", "return work.get_future().then(lambda done: done.value()[0])",
         "return work.get_future().then(lambda done: done.value()[0] / 2)"),
        [ZERO_0],
    ),
    "6: only the outermost group is told to sum": (
        ("shardloom.parallel.apply", "shard", "for group in (root, *ordered):", "for group in (root,):"),
        [ZERO_1, ZERO_2, ZERO_3],
    ),
    "26: the last microbatch does not reshard": (
        (DATA + ":Sharded", "begin_microbatch", "last or self.zero == 3", "self.zero == 3"),
        [ZERO_1, ZERO_2],
    ),
    "gradients are not reduced over replicas": (
        ("shardloom.parallel.apply", "shard", "if layout.dp_replicate > 1 else", "if layout.dp_replicate > 9 else"),
        [HYBRID],
    ),
    "gradients are not reduced at all": (
        (DATA + ":Replicas", "begin_microbatch", "_grad_sync = last", "_grad_sync = False"),
        [ZERO_0],
    ),
}  # fmt: skip


@pytest.mark.parametrize("bug", BUGS)
def test_the_parity_check_sees_the_bug(bug: str):
    mutation, layouts = BUGS[bug]
    reference = one_process(torch.float64)
    for layout in layouts:
        outcome = run_ranks(train_ranks, layout.world_size, layout, 3, torch.float64, (mutation,))[0]
        # Healthy code stays under 1e-12; every one of these is off by more than a part in a thousand.
        assert worst_error(outcome, reference) > 1e-3, layout


def test_a_mutation_that_finds_nothing_to_change_says_so():
    with (
        pytest.raises(AssertionError, match="holds 0 of"),
        mutated(("shardloom.parallel.apply", "shard", "no such line", "")),
    ):
        pass
