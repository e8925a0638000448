"""Bugs of the data of a run: shares, epochs and stages of a mixture; what is trained on of a conversation."""

from tests.mutation import Mutation
from tests.training.bugs.bug import AnyBug, UnitBug

_MIXTURE = "shardwright.data.mixture"
_TESTS = "tests/data/test_mixture.py"
_STAGE = f"{_TESTS}:test_a_run_with_a_stage_keeps_the_shares_of_each_step_and_the_epochs_of_each_source"
_SHARES = f"{_TESTS}:test_three_sources_are_within_one_sample_of_their_shares_at_any_point"
_RESUME = f"{_TESTS}:test_a_resume_on_other_ranks_takes_the_samples_of_a_run_that_never_stopped"
_LARGER_BATCH = f"{_TESTS}:test_a_stage_begins_at_its_step_when_the_batch_is_larger_after_a_resume"

_SAMPLES = "shardwright.data.samples"
_ANSWERS = "tests/data/test_samples.py:test_only_the_tokens_of_answers_are_predicted"

_MIRRORED = "tests/data/test_mirror.py:test_a_mirror_has_the_tokens_of_the_folder_and_keeps_its_bound"

_PUBLISHED = "tests/data/test_publication.py:check_order_across_listings"

STALE: dict[str, AnyBug] = {
    "blocks of a mirror are not compared with their checksums": UnitBug(
        Mutation(
            "shardwright.data.mirror:MirroredFile._is_right",
            "self._matches(number, memoryview(content)[begin : begin + self._block_bytes])",
            "True",
        ),
        _MIRRORED,
    ),
    "blocks of a mirror are never evicted": UnitBug(
        Mutation("shardwright.data.mirror:Mirror.fetch", "self._evict()", "pass"),
        _MIRRORED,
    ),
    "a block is kept at another place of the mirror": UnitBug(
        Mutation(
            "shardwright.data.mirror:Mirror.fetch",
            "os.pwrite(file.fileno(), content, first)",
            "os.pwrite(file.fileno(), content, 0)",
        ),
        _MIRRORED,
    ),
}
MASK: dict[str, AnyBug] = {
    "the loss is on prompts too": UnitBug(
        Mutation(
            f"{_SAMPLES}:PackedSamples.read",
            "self.split.trained(start + 1, length - 1)",
            "np.ones(length - 1, bool)",
        ),
        _ANSWERS,
    ),
    "the mask of answers is of the token that is read, not of that predicted": UnitBug(
        Mutation(
            f"{_SAMPLES}:PackedSamples.read",
            "self.split.trained(start + 1, length - 1)",
            "self.split.trained(start, length - 1)",
        ),
        _ANSWERS,
    ),
    "the mask of the answers of a document is of the token that is read": UnitBug(
        Mutation(
            f"{_SAMPLES}:SplitSamples.read",
            "self.split.trained(start + 1, length - 1)",
            "self.split.trained(start, length - 1)",
        ),
        _ANSWERS,
    ),
}
SCALE: dict[str, AnyBug] = {
    "the shares of a mixture drift": UnitBug(
        Mutation(
            f"{_MIXTURE}:MixtureStage.source_of",
            "pattern[n % len(pattern)]",
            "pattern[n * 7 % (len(pattern) - 1)]",
        ),
        _SHARES,
    ),
    "the source that can wait the longest is taken first": UnitBug(
        Mutation(f"{_MIXTURE}:interleaving", "until < soonest", "until > soonest"), _SHARES
    ),
}
ORDER: dict[str, AnyBug] = {
    "the order of a shard depends on the number of published shards": UnitBug(
        Mutation(
            "shardwright.data.shard_order:ShardOrder.__call__",
            "(self.seed, int(epoch), self.source, int(shard))",
            "(self.seed, int(epoch), self.source, int(shard), len(ends))",
        ),
        _PUBLISHED,
    ),
    "each epoch of a shard is in the order of the first": UnitBug(
        Mutation(
            "shardwright.data.shard_order:ShardOrder.__call__",
            "(self.seed, int(epoch), self.source, int(shard))",
            "(self.seed, 0, self.source, int(shard))",
        ),
        _PUBLISHED,
    ),
    "each epoch of a source is in the order of the first": UnitBug(
        Mutation(
            "shardwright.data.order:SampleOrder.__call__",
            "(self.seed, int(epoch), self.source)",
            "(self.seed, 0, self.source)",
        ),
        _STAGE,
    ),
    "every data rank reads the same samples of the sources": UnitBug(
        Mutation(
            "shardwright.data.batches:Batches.__init__",
            "data_rank * n + np.arange(n)",
            "np.arange(n)",
        ),
        _RESUME,
    ),
}
OFF_BY_ONE: dict[str, AnyBug] = {
    "a sample that ends in the next shard is one of the shard before": UnitBug(
        Mutation(
            "shardwright.data.samples:SplitSamples.shard_ends",
            "bisect_right(numbers, end, key=lambda i: sum(self.span(i)))",
            "bisect_right(numbers, end, key=lambda i: self.span(i)[0])",
        ),
        _PUBLISHED,
    ),
    "a sample that begins with a document is told as one of the document before": UnitBug(
        Mutation(
            "shardwright.data.shards:TokenSplit.document_at",
            "np.searchsorted(index, offset, side='right')",
            "np.searchsorted(index, offset)",
        ),
        "tests/training/test_sample_places.py:check_places",
    ),
    "a stage of a mixture begins one step late": UnitBug(
        Mutation(f"{_MIXTURE}:stages_of", "samples(step, stage.from_step)", "samples(step, stage.from_step + 1)"),
        _STAGE,
    ),
    "a stage of a mixture begins one sample late": UnitBug(
        Mutation(
            f"{_MIXTURE}:MixtureOrder.located",
            "np.searchsorted(self._begins, g, side='right')",
            "np.searchsorted(self._begins, np.maximum(g - 1, 0), side='right')",
        ),
        _STAGE,
    ),
}
RESUME: dict[str, AnyBug] = {
    "one source counts from zero in the next stage": UnitBug(
        Mutation(
            f"{_MIXTURE}:MixtureOrder.__init__",
            "taken[-1] + stage.counts(end - stage.from_sample)",
            "(taken[-1] + stage.counts(end - stage.from_sample)) * (np.arange(len(orders)) > 0)",
        ),
        _STAGE,
    ),
    "a stage is counted from the first step after a resume with another batch": UnitBug(
        Mutation(
            f"{_MIXTURE}:stages_of",
            "n_samples + samples(step, stage.from_step)",
            "samples(0, stage.from_step)",
        ),
        _LARGER_BATCH,
    ),
}
