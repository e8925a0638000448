"""Bugs of the prices of serving and of its simulated scheduler: each gives a plausible number, and a wrong one."""

from tests.mutation import Mutation
from tests.training.bugs.bug import AnyBug, UnitBug

_SIMULATION, _WORK = "shardwright.serving.simulate:_InstanceSimulation", "shardwright.serving.work"
_ONE_BY_ONE = "tests/serving/test_simulate.py:test_passes_computed_at_once_are_those_computed_one_by_one"
_TOUCHED = "tests/serving/test_work.py:test_experts_that_a_batch_touches_are_those_that_random_choices_touch"
_SHARED = "tests/serving/test_work.py:test_experts_of_dp_attention_are_shared_by_all_ranks_and_the_rest_is_not"
_HOST, _POOLS, _APART = (
    "tests/serving/test_host.py",
    "tests/serving/test_pools.py",
    "shardwright.serving.pools:_PoolSimulation",
)

SERVING: dict[str, AnyBug] = {
    "each token of a batch touches experts of its own": UnitBug(
        Mutation(
            f"{_WORK}:_experts_s",
            "f.n_experts / f.ep * (1 - (1 - f.top_k / f.n_experts) ** f.tokens)",
            "np.minimum(f.n_experts, f.top_k * f.tokens) / f.ep",
        ),
        _TOUCHED,
    ),
    "every rank of dp attention holds all experts of its group of tp": UnitBug(
        Mutation(
            "shardwright.serving.memory:_weights",
            "block.expert_numel / settings.stage_ranks",
            "block.expert_numel / settings.tp",
        ),
        _SHARED,
    ),
    "a measured processor reads its weights once for each token of a batch": UnitBug(
        Mutation(
            "shardwright.serving.work:host.matmul_s",
            "np.minimum(one_by_one, together)",
            "np.maximum(one_by_one, together)",
        ),
        f"{_HOST}:test_many_tokens_read_the_weights_together",
    ),
    "a sequence on a processor takes its own time once for each head": UnitBug(
        Mutation(
            "shardwright.serving.work:host.layer_s",
            "(f.sequence_s + f.head_s * f.heads / f.tp) * f.requests",
            "(f.sequence_s + f.head_s) * f.heads / f.tp * f.requests",
        ),
        f"{_HOST}:test_a_token_takes_the_launches_the_weights_and_the_operations",
    ),
    "ranks beyond the cores of a processor do not share them": UnitBug(
        Mutation(
            "shardwright.serving.work:host.layer_s",
            "serving.cluster.accelerator.core_share",
            "1.0",
        ),
        f"{_HOST}:test_ranks_beyond_the_cores_share_them",
    ),
    "attention of each prompt on a processor is started once for all": UnitBug(
        Mutation("shardwright.serving.work:host.layer_s", "batch.prompts", "np.minimum(batch.prompts, 1)"),
        f"{_HOST}:test_each_prompt_is_attended_by_itself",
    ),
    "a layer over tp is launched like a whole one": UnitBug(
        Mutation("shardwright.serving.work:host.layer_s", "settings.tp > 1", "settings.tp > 2"),
        f"{_HOST}:test_over_tp_a_layer_has_its_own_launches_and_its_messages",
    ),
    "each transfer of a cache has the whole link": UnitBug(
        Mutation(f"{_APART}._rate", "self.reading.transfer_s * transfer.reader.sending", "self.reading.transfer_s"),
        f"{_POOLS}:check_the_link_is_shared",
    ),
    "a place for decoding is taken when the cache has arrived": UnitBug(
        Mutation(
            f"{_APART}._pull",
            "writer.taken >= self.writing.scheduler.max_batch",
            "len(writer.ends) >= self.writing.scheduler.max_batch",
        ),
        f"{_POOLS}:check_places_are_free_when_they_are_taken",
    ),
    "a request joins a pass for decoding that is under way": UnitBug(
        Mutation(
            "shardwright.serving.pools:_passes",
            "ceil((sqrt(half * half + 2 * grows * seconds) - half) / grows - 1e-9)",
            "int((sqrt(half * half + 2 * grows * seconds) - half) / grows)",
        ),
        f"{_POOLS}:check_passes_of_decoding",
    ),
    "an instance that reads prompts begins with others meanwhile": UnitBug(
        Mutation(
            f"{_APART}._read", "not reader.busy and (taken := self._taken(reader))", "(taken := self._taken(reader))"
        ),
        f"{_POOLS}:check_the_line_before_prefill",
    ),
    "the cache of a request that ended is not free": UnitBug(
        Mutation(
            f"{_SIMULATION}._end",
            "self.reserved -= self._reserved(at)",
            "self.reserved -= done.input_len",
        ),
        _ONE_BY_ONE,
        ("mixed", 7),
    ),
    "the cache grows one pass too early": UnitBug(
        Mutation(f"{_SIMULATION}._decode", "grows * count * (count - 1) / 2", "grows * count * (count + 1) / 2"),
        _ONE_BY_ONE,
        ("mixed", None),
    ),
    "a chunk of a prompt attends to itself alone": UnitBug(
        Mutation(f"{_SIMULATION}._read", "chunk * (done + chunk / 2)", "chunk * (chunk / 2)"),
        _ONE_BY_ONE,
        ("prefill first", 7),
    ),
    "requests decode while prompts are read before them": UnitBug(
        Mutation(f"{_SIMULATION}._read", "len(self.ends) if self.engine.mixed else 0", "len(self.ends)"),
        _ONE_BY_ONE,
        ("prefill first", None),
    ),
    "a request is admitted without room for its answer": UnitBug(
        Mutation(f"{_SIMULATION}._reserved", "self.engine.reserved", "0.0"), _ONE_BY_ONE, ("no eviction", 7)
    ),
    "an engine that does not cut prompts cuts them": UnitBug(
        Mutation(f"{_SIMULATION}._chunks", "not self.engine.chunked", "False"), _ONE_BY_ONE, ("whole prompts", 7)
    ),
    "prompts wait one pass too long for others": UnitBug(
        Mutation(
            f"{_SIMULATION}._decode",
            "self.held_since + self.engine.hold_passes - self.passes",
            "self.held_since + self.engine.hold_passes + 1 - self.passes",
        ),
        _ONE_BY_ONE,
        ("held for prompts", 7),
    ),
    "requests that decode do not count to what a held pass needs": UnitBug(
        Mutation(f"{_SIMULATION}._holds", "sum(self._chunks(decoding)) + decoding", "sum(self._chunks(decoding))"),
        _ONE_BY_ONE,
        ("held for tokens", None),
    ),
}
