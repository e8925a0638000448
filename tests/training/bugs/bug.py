"""What a known bug is: a change of our own code, and where it has to be seen.

`Bug` is for `shardwright verify`, `ResumeBug` for a stop and a resume, `UnitBug` for one test of another file. Names of
layouts, models and rooms that the bugs share are here too.
"""

from dataclasses import dataclass, field, replace
from typing import Any

from shardwright.config import OptimizerSection, Scope
from shardwright.config.average import AverageSection
from shardwright.config.sections import PreferenceSection
from shardwright.layout.layout import Layout
from shardwright.model.number_formats import Fp8
from shardwright.model.sections import LatentAttentionSpec, MoESpec
from shardwright.model.spec import ModelSpec
from shardwright.verification import Case
from shardwright.verification.case import CaseStage, cut_optimizer
from tests.mutation import Mutation
from tests.training.worlds import CASE, LONG, SPEC
from tests.training.worlds import EVEN as EVEN

STEP, TRAINER = "shardwright.training.step", "shardwright.training.step:Trainer"
PASSES = "shardwright.training.forward_backward"
APPLY, DATA = "shardwright.parallel.apply", "shardwright.parallel.data"
MODEL, EXCHANGE = "shardwright.parallel.model:ParallelModel", "shardwright.parallel.expert:ExpertExchange"
ROUTER, NORM = "shardwright.parallel.routing:ShardedRouter", "shardwright.training.forward_backward:gradient_norm"
TENSOR, LOSS = "shardwright.parallel.tensor", "shardwright.parallel.loss:cross_entropy"
REDUCTIONS, RING = "shardwright.parallel.reductions", "shardwright.parallel.ring"
CONTEXT, ULYSSES_ROOM = "shardwright.parallel.context", "shardwright.parallel.ulysses"
SEQUENTIAL = "shardwright.parallel.microbatch_runner:SequentialRunner"
STAGE, STAGES = "shardwright.parallel.pipeline.runner:_RankStep", "shardwright.parallel.pipeline.stage"
TIED = "shardwright.parallel.pipeline.tied:TiedParameters"
STATE = "shardwright.training.checkpoint.state"

ONE = Layout()
ZERO_0, ZERO_1, ZERO_2, ZERO_3 = (
    Layout(dp_replicate=2),
    Layout(dp_shard=2, zero=1),
    Layout(dp_shard=2, zero=2),
    Layout(dp_shard=2, zero=3),
)
HYBRID = Layout(dp_replicate=2, dp_shard=2, zero=2)
TP, SP = Layout(tp=2, sequence_parallel=False), Layout(tp=2, sequence_parallel=True)
ZIGZAG, ON_RING = Layout(cp=2), Layout(cp=2, cp_method="ring")
ALLGATHER, ULYSSES = Layout(cp=2, cp_method="allgather"), Layout(cp=2, cp_method="ulysses")
PP, ZB, ZB_V, DUALPIPE = (Layout(pp=2, pp_schedule=name) for name in ("1f1b", "zb-h1", "zb-v", "dualpipe"))
EP, EP_OF_4 = Layout(dp_shard=2, zero=2, ep=2), Layout(dp_shard=4, zero=1, ep=2)
SP_EP = Layout(tp=2, sequence_parallel=True, ep=2)

EXPERTS = MoESpec(n_experts=4, top_k=2, d_ffn=16, bias_rate=0.01, aux_loss=0.1, aux_scope="batch", z_loss=0.01)
FEW_PLACES = replace(EXPERTS, capacity_factor=1.0)
LATENT = LatentAttentionSpec(q_rank=10, kv_rank=12, nope_dim=8, rope_dim=4, v_dim=8)


@dataclass(frozen=True)
class Bug:
    """A piece of code changed, and the layouts in which `verify` has to see it."""

    mutation: Mutation
    layouts: list[Layout]
    dtype: str = "float64"
    spec: dict[str, Any] = field(default_factory=dict)
    """What is changed of the model that is trained: the features that a run file has to have."""
    also: tuple[Mutation, ...] = ()
    """Changes of other code, where the bug needs more than one."""
    documents: bool = False
    """Whether attention and positions are within documents."""
    padded: bool = False
    """Whether sequences have padding."""
    preference: str = "none"
    """The loss of pairs of answers, which are documents."""
    optimizer: str = "adamw"
    fp8: Fp8 | None = None
    stages: tuple[CaseStage, ...] = ()
    """The batches of the steps in turn."""
    average: AverageSection = field(default_factory=AverageSection)
    crashes: bool = False
    """Whether a rank raises or hangs, and no number shows the bug."""

    @property
    def mutations(self) -> tuple[Mutation, ...]:
        """All changes of code."""
        return (self.mutation, *self.also)

    def case(self, layout: Layout) -> Case:
        """Three microbatches a step; four for DualPipe, which wants an even number, and in 16 bits, where fewer have
        too few terms to show that a sum was rounded."""
        base = CASE if layout.cp * layout.tp == 1 else LONG
        scope: Scope = "document" if self.documents or self.preference != "none" else "sequence"
        preference = PreferenceSection.model_validate({"kind": self.preference})
        accumulation = 4 if layout == DUALPIPE or self.dtype in ("bfloat16", "float16") else 3
        return replace(
            base,
            spec=replace(base.spec, **self.spec),
            micro_batch=base.global_batch // (accumulation * layout.data_ranks),
            dtype=self.dtype,
            optimizer=base.optimizer
            if self.optimizer == "adamw"
            else cut_optimizer(OptimizerSection(name=self.optimizer)),
            attention=scope,
            positions=scope,
            padded=self.padded or self.preference != "none",
            preference=preference,
            fp8=self.fp8,
            stages=self.stages,
            average=self.average,
        )


@dataclass(frozen=True)
class ResumeBug:
    """A piece of code changed, for a run that `layouts[0]` saves and `layouts[1]` takes up: the parameters after the
    next step are then not those of the same run without the bug."""

    mutation: Mutation
    layouts: tuple[Layout, Layout]
    spec: ModelSpec = SPEC
    crashes = False

    @property
    def mutations(self) -> tuple[Mutation, ...]:
        """All changes of code."""
        return (self.mutation,)


@dataclass(frozen=True)
class UnitBug:
    """A piece of code changed that makes a test of another file fail; `verify` cannot see it where both of its sides
    run that code."""

    mutation: Mutation
    test: str
    """`tests/FILE.py:FUNCTION`"""
    given: tuple[Any, ...] = ()
    """The arguments of that test."""
    put_in_there: bool = False
    """Whether that test puts the bug in itself, and passes when it has seen it."""
    crashes = False

    @property
    def mutations(self) -> tuple[Mutation, ...]:
        """All changes of code."""
        return (self.mutation,)


AnyBug = Bug | ResumeBug | UnitBug
