"""Seconds of a step of GRPO: answers are generated and scored, the policy is trained on them, and its weights are sent.

    on policy          T = G + a N + S + U + M + W + c
    k steps off policy T = max(G + a N, S + U + M) + W + c      generation and training on separate accelerators

G generation of N answers, a N rewards and data of N answers, S forward passes of the policy and of the reference, U
optimizer steps, M weights and states that are moved between the device and its host, W weights sent to the instances
that generate, c the rest. G is the simulated time of an instance until its last answer (`serving.simulate`); with k > 1
it is the mean time between two steps of a closed loop of k N answers, whose last answers overlap with the first of the
next step. U is the planner's step time (`cost.step`), and S its forward passes, through a pipeline without a schedule.

Shao et al., DeepSeekMath (arXiv 2402.03300), section 4.1: GRPO. Sheng et al., HybridFlow (arXiv 2409.19256), section
5: colocated generation and training. Noukhovitch et al. (arXiv 2410.18252): k steps off policy. Ignored: environments
that call tools, answers of several turns, and validation.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from shardwright.cost.hardware import Cluster, evenly
from shardwright.cost.job import Job
from shardwright.cost.step import Estimate, StagePasses
from shardwright.rl.answers import AnswerLengths, packed
from shardwright.rl.transfer import WeightTransfer, weight_transfer
from shardwright.serving.engines import ServingEngine
from shardwright.serving.memory import memory
from shardwright.serving.search import ServingLayout
from shardwright.serving.setting import Serving, Settings
from shardwright.serving.simulate import PassTable, Scheduler, closed_loop, run
from shardwright.split.documents import attended_tokens
from shardwright.system.units import round_up

COLOCATED_SHARE = 0.6
"""Share of the memory for an engine on the accelerators that train, the default of NeMo-RL: the rest is for buffers and
libraries of the trainer."""
ROUNDS = 3
"""Steps of a closed loop that are simulated after the first answers."""
GENERATION, ANSWERS, SCORING, TRAINING = "generation", "rewards and data", "scoring", "training"
MOVING, WEIGHTS, OTHER = "moving to and from the host", "weight transfer", "other"


@dataclass(frozen=True)
class RLRates:
    """Constants of the software around engine and trainer. `generation`, `training`: factors on the seconds of an
    engine and of a trainer alone. `link_share`: share of a link's bandwidth that sending weights reaches.
    `host_bytes_per_s`: rate at which weights and states are moved to the host and back. `step_s`: once in each step.
    `answer_s`: for each answer: its reward, and its data on the way from engine to trainer."""

    generation: float
    training: float
    link_share: float
    host_bytes_per_s: float
    step_s: float
    answer_s: float


RATES = RLRates(1.23, 1.33, 0.789, 6.18e9, 4.76, 0.00524)
"""Fitted by `benchmarks/fit_rl.py` to the ten published steps of NeMo-RL 0.4."""


@dataclass(frozen=True, kw_only=True)
class RLTask:
    """A step to price. `job`: of training, on all accelerators; `seq_len` is the length of a packed sequence, and the
    batch is computed. `serving`, `engine`: of generation, by the model without adapters. `n_answers`: of a step;
    `n_updates`: optimizer steps for them. `off_policy_steps`: k, 0 on policy. `reference`: whether a reference scores
    too. `packing`: whether several answers share a sequence. `colocated_share`: share of the memory for an engine on
    the accelerators that train."""

    job: Job
    serving: Serving
    engine: ServingEngine
    prompt_len: int
    answers: AnswerLengths
    n_answers: int
    n_updates: int = 1
    off_policy_steps: int = 0
    reference: bool = True
    packing: bool = True
    colocated_share: float = COLOCATED_SHARE
    rates: RLRates = RATES

    @property
    def cluster(self) -> Cluster:
        """Return all accelerators."""
        return self.job.cluster

    @cached_property
    def update_lengths(self) -> list[int]:
        """Return the tokens of prompt and answer, for the answers of one update."""
        return [self.prompt_len + length for length in self.answers.lengths(self.n_answers // self.n_updates)]

    @cached_property
    def sequences(self) -> int:
        """Return the number of packed sequences of an update."""
        return packed(self.update_lengths, self.job.seq_len) if self.packing else len(self.update_lengths)

    def training_job(self, size: int, unit: int) -> Job:
        """Return the job of an update on `size` accelerators, with full micro-batches of `unit` sequences."""
        batch = round_up(self.sequences, unit)
        tokens = attended_tokens(self.update_lengths)
        return replace(self.job, cluster=part(self.cluster, size), global_batch=batch, document_tokens=tokens)


def part(cluster: Cluster, size: int) -> Cluster:
    """Return `size` accelerators of a cluster, in as few nodes as possible."""
    return replace(cluster, size=size, node_size=evenly(size, cluster.node_size))


@dataclass(frozen=True)
class GenerationPool:
    """Instances that generate. `seconds`: for the answers of a step. `tail_s`: the part of them in which at most a
    tenth of the answers are not complete. `answers`: of an instance in a step; `room`: answers of mean length for which
    its cache has room; `weight_bytes`: of a rank."""

    layout: ServingLayout
    seconds: float
    tail_s: float
    answers: int
    room: float
    weight_bytes: float

    @property
    def size(self) -> int:
        """Return the number of accelerators."""
        return self.layout.degrees.size * self.layout.replicas


def generation_pool(task: RLTask, layout: ServingLayout, memory_share: float) -> GenerationPool | None:
    """Return the pool with this layout; None if the cache has no room for the longest answer."""
    degrees, replicas = layout.degrees, layout.replicas
    serving = replace(task.serving, cluster=part(task.cluster, degrees.size * replicas))
    # The slowest instance has the longest answer, and every `replicas`-th of the others.
    lengths = sorted(task.answers.lengths(task.n_answers), reverse=True)[::replicas]
    steps = max(1, task.off_policy_steps)
    users = steps * len(lengths)
    engine = replace(
        task.engine, memory_share=memory_share, max_batch=min(task.engine.max_batch, -(-users // degrees.dp))
    )
    length = task.prompt_len + task.answers.mean
    usage = memory(serving, Settings.from_layouts([degrees]), engine, length)
    room = float(np.max(usage.cache_tokens(degrees.dp)))
    if room < task.prompt_len + task.answers.maximum:
        return None
    table = PassTable(serving, degrees, engine.max_tokens)
    scheduler = Scheduler(engine, engine.max_batch * degrees.dp, room)
    n_batches = 1 if steps == 1 else steps + ROUNDS
    outputs = [int(tokens) for seed in range(n_batches) for tokens in np.random.default_rng(seed).permutation(lengths)]
    served = run(table, scheduler, closed_loop([task.prompt_len] * len(outputs), outputs), users)
    if steps == 1:
        seconds, tail_s = served.span_s, served.span_s - float(np.percentile(served.e2e_s, 90))
    else:
        seconds, tail_s = float(served.after(users).e2e_s.mean()) / steps, 0.0
    factor = task.rates.generation
    return GenerationPool(
        layout, factor * seconds, factor * tail_s, len(lengths), room / length, float(np.max(usage.weights))
    )


@dataclass(frozen=True)
class TrainingPool:
    """Accelerators that train. `update_s`, `score_s`: of the updates of a step, and of one model's forward passes over
    its answers. `weight_bytes`, `state_bytes`: of the fullest rank, for the working weights and for all else that is
    kept between steps."""

    text: str
    estimate: Estimate
    update_s: float
    score_s: float
    weight_bytes: float
    state_bytes: float

    @property
    def size(self) -> int:
        """Return the number of accelerators."""
        return self.estimate.job.cluster.size


def training_pool(task: RLTask, text: str, priced: Estimate) -> TrainingPool:
    """Return the pool with the layout of an estimate."""
    job, candidates, kinds = priced.job, priced.candidates, priced.memory.kinds
    forward, _ = StagePasses(job, candidates).passes_of_ranks()
    passes = int(candidates.microbatches(job.global_batch)[0]) + candidates.pp - 1
    times = task.rates.training * task.n_updates
    kept = [float(np.max(kinds[kind])) for kind in ("weights", "master", "optimizer")]
    return TrainingPool(
        text, priced, times * priced.step_s, times * passes * float(forward.max()), kept[0], sum(kept[1:])
    )


@dataclass(frozen=True)
class RLStep:
    """A step with its layouts. `separate`: generation has accelerators of its own."""

    task: RLTask
    generation: GenerationPool
    training: TrainingPool
    separate: bool

    @cached_property
    def transfer(self) -> WeightTransfer:
        """Return the transfer of the weights from the trainer to the instances that generate."""
        return weight_transfer(
            self.task.cluster, self.training.estimate, self.training.weight_bytes, self.generation.weight_bytes,
            self.separate, self.task.rates.link_share,
        )  # fmt: skip

    @property
    def swaps_reference(self) -> bool:
        """Return whether the weights of a reference replace the policy's. With adapters the reference is the policy
        without them, and has no weights of its own."""
        return self.task.reference and self.task.job.model.lora is None

    @cached_property
    def moved_bytes(self) -> float:
        """Return the bytes that a rank moves to and from its host in a step: on shared accelerators weights and states
        leave for generation and return; the weights make way for the reference's, which also leave, and return."""
        training = self.training
        states = 0.0 if self.separate else 2 * (training.weight_bytes + training.state_bytes)
        return states + 3 * training.weight_bytes * self.swaps_reference

    @cached_property
    def parts_s(self) -> dict[str, float]:
        """Return the seconds of each part; off policy, parts on different accelerators overlap."""
        task = self.task
        return {
            GENERATION: self.generation.seconds,
            ANSWERS: task.rates.answer_s * task.n_answers,
            SCORING: self.training.score_s * (1 + task.reference),
            TRAINING: self.training.update_s,
            MOVING: self.moved_bytes / task.rates.host_bytes_per_s,
            WEIGHTS: self.transfer.seconds,
            OTHER: task.rates.step_s,
        }

    def hidden(self) -> Sequence[str]:
        """Return the parts that run while longer parts on other accelerators run, and add nothing to the step."""
        if not self.task.off_policy_steps:
            return ()
        sides = (GENERATION, ANSWERS), (SCORING, TRAINING, MOVING)
        return min(sides, key=lambda side: sum(self.parts_s[name] for name in side))

    @cached_property
    def total_s(self) -> float:
        """Return the seconds of the step."""
        hidden = self.hidden()
        return sum(seconds for name, seconds in self.parts_s.items() if name not in hidden)

    @property
    def tokens_per_s(self) -> float:
        """Return tokens of prompts and answers in a second, of each accelerator."""
        tokens = self.task.n_answers * (self.task.prompt_len + self.task.answers.mean)
        return tokens / self.total_s / self.task.cluster.size
