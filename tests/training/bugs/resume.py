"""Bugs that lose something between a stop and a resume."""

from dataclasses import replace

from tests.mutation import Mutation
from tests.training.bugs.bug import (
    EVEN,
    EXPERTS,
    ONE,
    PP,
    STAGES,
    STATE,
    ZB_V,
    ZERO_3,
    AnyBug,
    Bug,
    ResumeBug,
    UnitBug,
)
from tests.training.worlds import SPEC

LOAD = "tests.training.checkpoints:load"

RESUME: dict[str, AnyBug] = {
    "22: layers are numbered from the start of their stage": Bug(
        Mutation(
            f"{STAGES}:StageModel.__init__",
            "{str(i): whole.layers[str(i)] for i in layers}",
            "{str(i - layers[0]): whole.layers[str(i)] for i in layers}",
        ),
        [PP],
    ),
    "the moments of the optimizer are not taken up": ResumeBug(
        Mutation(
            LOAD,
            "read_into(folder, manifest, tensors, stored_tensors(trainer))",
            "read_into(folder, manifest, {name: each for name, each in tensors.items() if name.startswith('model/')})",
        ),
        (ONE, ONE),
    ),
    "the step count of the optimizer is not saved": ResumeBug(
        Mutation(
            f"{STATE}:named_state",
            "optimizer.state.get(parameter, {}).items()",
            "[(kind, tensor) for kind, tensor in optimizer.state.get(parameter, {}).items() if kind != 'step']",
        ),
        (ONE, ONE),
    ),
    "what has no gradient is not saved": ResumeBug(
        Mutation(
            f"{STATE}:named_tensors",
            "{f'model/{k}': v for k, v in parameters.items()}",
            "{f'model/{k}': v for k, v in parameters.items() if v.requires_grad}",
        ),
        (ONE, ONE),
        replace(EVEN, moe=EXPERTS),
    ),
    "a shard is read from the start of the one that was saved": ResumeBug(
        Mutation(
            "shardwright.training.checkpoint.storage:overlap", "slice(low - at, high - at)", "slice(0, high - low)"
        ),
        (ONE, ZERO_3),
    ),
    "a checkpoint is written in bf16": ResumeBug(
        Mutation(
            "shardwright.training.checkpoint.shards:write_pieces",
            "take(piece).detach().cpu().contiguous()",
            "take(piece).detach().cpu().bfloat16().to(take(piece).dtype).contiguous()",
        ),
        (ONE, ONE),
    ),
    "the duplicate of a tied embedding keeps its initial values": ResumeBug(
        Mutation(LOAD, "trainer.model.after_change()", "pass"),
        (ZB_V, ZB_V),
        replace(SPEC, n_layers=4, tied_embedding=True),
    ),
    "samples start again from the first": UnitBug(
        Mutation(
            "shardwright.data.batches:Batches.__init__",
            "start_sample + schedule.samples(start_step, step)",
            "schedule.samples(start_step, step)",
        ),
        "tests/data/test_batches.py:test_batches_read_ahead_do_not_count_as_seen",
        (1,),
    ),
}
