"""Proves what a rank of a pipeline holds, computes, keeps and sends, against what its schedule says.

What it computes is proven by tests/training/test_pipeline.py, what ZeRO adds by test_stage_data.py. On gloo, worlds of
2 and 4, float64.

B, T, D as in the model; X bytes of what goes between two stages.
"""

import weakref
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from shardwright.layout.layout import Layout
from shardwright.model.sections import MoESpec
from shardwright.model.spec import ModelSpec
from shardwright.model.transformer import Transformer
from shardwright.parallel.observer import Observer, Running
from shardwright.parallel.pipeline.runner import Pipeline
from shardwright.schedule.actions import Action, Schedule
from shardwright.schedule.build import build as build_schedule
from shardwright.schedule.messages import PairExchange, with_messages
from shardwright.schedule.simulate import Times, simulate
from shardwright.split.stages import stage_layers
from shardwright.training.clock import StepTimeline
from shardwright.training.step import Trainer
from tests.distributed import run_ranks
from tests.marks import rest_prove
from tests.traffic import Traffic
from tests.training.worlds import GLOBAL_BATCH, RATE, SEQ_LEN, SPEC, build, local_batch

EVEN = replace(SPEC, n_layers=4, d_model=32, n_heads=4, n_kv_heads=2, d_ffn=48, vocab_size=32)
MICROBATCHES = 6
B, T, ELEMENT = GLOBAL_BATCH // MICROBATCHES, SEQ_LEN, 8
X = B * T * EVEN.d_model * ELEMENT


def pipeline(trainer: Trainer) -> Pipeline:
    assert isinstance(trainer.model.runner, Pipeline)
    return trainer.model.runner


def take_step(trainer: Trainer, step: int = 0, microbatches: int = MICROBATCHES) -> None:
    trainer.step(local_batch(step, 0, 1, microbatches), step, RATE)


def schedule_of(layout: Layout) -> Schedule:
    return build_schedule(layout.pp_schedule, layout.pp, MICROBATCHES, layout.virtual_stages)


# --- what it holds


def sizes(layout: Layout, spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    """Shapes of the parameters on this rank, whole if they are cut by other axes."""
    return {name: tuple(p.shape) for name, p in build(layout, torch.float64, spec).model.named_parameters.items()}


HELD = [
    Layout(pp=4, pp_schedule="zb-h1"),
    Layout(pp=2, stage_layers=(3, 1)),
    Layout(pp=2, pp_schedule="interleaved-1f1b", virtual_stages=2),
    Layout(pp=2, pp_schedule="zb-v"),
    Layout(pp=2, pp_schedule="dualpipe"),
    Layout(pp=2, tp=2, sequence_parallel=False),
    Layout(pp=2, dp_shard=2, zero=3),
]


@pytest.mark.parametrize("tied", [False, True], ids=["", "tied"])
@pytest.mark.parametrize("layout", rest_prove(HELD, HELD[1], HELD[3]), ids=str)
def test_a_rank_holds_its_layers_under_their_names_in_the_whole_model(layout: Layout, tied: bool):
    spec = replace(EVEN, tied_embedding=tied)
    with torch.device("meta"):
        whole = {name: tuple(p.shape) for name, p in Transformer(spec).named_parameters()}
    layers = stage_layers(spec, layout, T)
    for rank, held in enumerate(run_ranks(sizes, layout.world_size, layout, spec)):
        expected = set()
        for stage in schedule_of(layout).stages_of(layout.coordinates(rank)["pp"]):
            starts = [f"layers.{i}." for i in layers[stage]]
            starts += ["embedding."] if stage == 0 or (tied and stage == layout.n_stages - 1) else []
            starts += ["norm.", "head."] if stage == layout.n_stages - 1 else []
            expected |= {name for name in whole if name.startswith(tuple(starts))}
        assert held == {name: whole[name] for name in expected}


def test_the_ranks_together_hold_every_parameter_once():
    held = run_ranks(sizes, 2, Layout(pp=2, pp_schedule="zb-v"), EVEN)
    counts = Counter(name for names in held for name in names)
    assert set(counts.values()) == {1}
    assert sum(torch.Size(shape).numel() for names in held for shape in names.values()) == EVEN.n_parameters


# --- what it computes


class Products(TorchDispatchMode):
    """FLOPs of products of two matrices, or of rows with those of their experts, a multiply-add counting 2; those of
    attention are in ops of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.flops = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if (name := func._schema.name) in ("aten::mm", "aten::addmm", "aten::addmm_"):
            left, right = args[-2:]
            self.flops += 2 * left.shape[0] * left.shape[1] * right.shape[1]
        elif name == "shardwright::grouped_matmul":
            rows, weights = args[:2]
            self.flops += 2 * rows.shape[0] * weights.shape[1] * weights.shape[2]
        elif name == "shardwright::grouped_weight_gradient":
            gradients, rows = args[:2]
            self.flops += 2 * gradients.shape[0] * gradients.shape[1] * rows.shape[1]
        elif name == "aten::bmm":
            assert args[0].shape[1] == 1, "weighted sums of rows"
        else:
            assert name not in ("aten::baddbmm", "aten::linear"), name
        return func(*args, **(kwargs or {}))


class CountedActions(Observer):
    """The FLOPs of the products of each action, in the place of its times."""

    def __init__(self) -> None:
        self.flops: Counter[Action] = Counter()

    def begin(self, running: Running) -> None:
        if isinstance(running, Action):
            self.products = Products()
            self.products.__enter__()

    def end(self, running: Running) -> None:
        if isinstance(running, Action):
            self.products.__exit__(None, None, None)
            self.flops[running] = self.products.flops


def flops_of_actions(layout: Layout, spec: ModelSpec = EVEN) -> Counter[Action]:
    """Of each action of a step on this rank, the FLOPs of its products."""
    trainer = build(layout, torch.float64, spec)
    take_step(trainer)
    counted = CountedActions()
    trainer.model.observers.add(counted)
    take_step(trainer, 1)
    return counted.flops


@pytest.mark.parametrize("recompute", rest_prove(["none", "selective", "full"], "none", "full"))
@pytest.mark.parametrize(
    ("schedule", "tp"),
    rest_prove([("1f1b", 1), ("zb-h1", 1), ("dualpipe", 1), ("zb-h1", 2), ("zb-v", 2)], ("1f1b", 1), ("zb-h1", 2)),
)
def test_i_computes_the_gradients_of_inputs_alone_and_w_those_of_weights_alone(schedule: str, tp: int, recompute: str):
    layout = Layout(pp=2, tp=tp, pp_schedule=schedule, recompute=recompute, sequence_parallel=False)
    layer = (EVEN.n_matmul_parameters - EVEN.vocab_size * EVEN.d_model) // EVEN.n_layers
    layers = stage_layers(EVEN, layout, T)
    run_on = Counter[Action]()
    for found in run_ranks(flops_of_actions, layout.world_size, layout):
        for action, flops in found.items():
            blocks = len(layers[action.stage]) * layer
            head = EVEN.vocab_size * EVEN.d_model if action.stage == layout.n_stages - 1 else 0
            product = 2 * B * T * (blocks + head) // tp
            # Computing a block again stops where its last product has its input; selective computes no product again.
            last = EVEN.d_model * EVEN.d_ffn * len(layers[action.stage])
            again = 2 * B * T * (blocks - last) // tp if recompute == "full" and action.op in "BI" else 0
            assert flops == {"F": 1, "I": 1, "W": 1, "B": 2}[action.op] * product + again, action
        run_on.update(found.keys())
    assert run_on == Counter({action: tp for _, action in schedule_of(layout).actions()})


@pytest.mark.parametrize(
    "layout",
    [Layout(pp=2, pp_schedule="zb-h1"), Layout(pp=2, dp_shard=2, zero=1, ep=2, pp_schedule="zb-h1")],
    ids=str,
)
def test_gradients_of_experts_wait_for_w_and_those_of_routers_do_not(layout: Layout):
    moe = MoESpec(n_experts=4, top_k=2, d_ffn=16, n_shared=1, first_dense=1)
    spec = replace(EVEN, moe=moe)
    layers = stage_layers(spec, layout, T)
    total = Counter[Action]()
    for found in run_ranks(flops_of_actions, layout.world_size, layout, spec):
        total.update(found)
    for action, flops in total.items():
        held = layers[action.stage]
        matrices = sum(spec.layer_matmul_parameters(layer) for layer in held)
        matrices += spec.vocab_size * spec.d_model if action.stage == layout.n_stages - 1 else 0
        routers = sum(spec.has_experts(layer) for layer in held) * moe.n_experts * spec.d_model
        elements = {"F": matrices, "I": matrices + routers, "W": matrices - routers}[action.op]
        # Rows go to other ranks of ep, so their sum is what is known.
        assert flops == 2 * B * T * elements * layout.data_ranks, action
    assert len(total) == 3 * MICROBATCHES * layout.n_stages


# --- what it keeps


class Kept:
    """What the graph of a microbatch holds in the place of a saved tensor; gone when the graph lets it go."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


class Held(Observer):
    """After each action, what is alive on this rank, in whatever hands: microbatches x stages of which something was
    saved for the backward pass; of which something was left for W; and tensors received into."""

    def __init__(self, pipeline: Pipeline) -> None:
        self.stages = pipeline.stages
        self.graphs: weakref.WeakKeyDictionary[Any, tuple[int, int]] = weakref.WeakKeyDictionary()
        self.waiting: weakref.WeakSet[Any] = weakref.WeakSet()
        self.buffers: list[weakref.ref[torch.UntypedStorage]] = []
        self.seen: list[tuple[int, int, int]] = []
        make = pipeline.activation

        def received(tokens_BT: Tensor) -> Tensor:
            tensor = make(tokens_BT)
            self.buffers.append(weakref.ref(tensor.untyped_storage()))
            self.look()
            return tensor

        pipeline.activation = received

    def begin(self, running: Running) -> None:
        if not isinstance(running, Action):
            return

        def keep(tensor: Tensor) -> Kept:
            self.graphs[kept := Kept(tensor)] = running.stage, running.microbatch
            return kept

        gradients = self.stages[running.stage].model.gradients
        self.take = take = gradients.take
        gradients.take = lambda: self.left(take())  # type: ignore[method-assign]
        self.hooks = torch.autograd.graph.saved_tensors_hooks(keep, lambda kept: kept.tensor)
        self.hooks.__enter__()

    def end(self, running: Running) -> None:
        if isinstance(running, Action):
            self.hooks.__exit__()
            self.stages[running.stage].model.gradients.take = self.take  # type: ignore[method-assign]
            self.look()

    def left(self, compute: Callable[[], None]) -> Callable[[], None]:
        self.waiting.add(compute)
        return compute

    def look(self) -> None:
        alive = sum(buffer() is not None for buffer in self.buffers)
        self.seen.append((len(set(self.graphs.values())), len(self.waiting), alive))


def peaks(layout: Layout) -> tuple[int, int, int]:
    """The most that was alive at once in a step."""
    trainer = build(layout, torch.float64, EVEN)
    take_step(trainer)
    held = Held(pipeline(trainer))
    trainer.model.observers.add(held)
    take_step(trainer, 1)
    held.look()
    assert held.seen[-1] == (0, 0, 0), "nothing is left when the step is over"
    in_flight, left, received = (max(each) for each in zip(*held.seen, strict=True))
    return in_flight, left, received


def most_buffers(entries: list[Action | PairExchange], rank: int) -> int:
    """What a rank that runs this list needs: an input from its receipt until its gradient is there, and a gradient
    until that of the weights is, as it is a factor of the last product."""
    alive: set[tuple[int, str, int]] = set()
    most = 0
    for entry in entries:
        if isinstance(entry, PairExchange):
            alive |= {message[:3] for message in entry.messages if message.receiver == rank}
        else:
            ends = {"F": "", "B": "FB", "I": "F", "W": "B"}[entry.op]
            alive -= {(entry.stage, op, entry.microbatch) for op in ends}
        most = max(most, len(alive))
    return most


def buffers_of(schedule: Schedule) -> list[int]:
    return [most_buffers(entries, rank) for rank, entries in enumerate(with_messages(schedule))]


ALIVE = [
    Layout(pp=4),
    Layout(pp=2, pp_schedule="afab"),
    Layout(pp=4, pp_schedule="zb-h1"),
    Layout(pp=2, pp_schedule="zb-v"),
    Layout(pp=2, pp_schedule="dualpipe"),
]


@pytest.mark.parametrize("layout", rest_prove(ALIVE, ALIVE[0], ALIVE[3]), ids=str)
def test_no_more_microbatches_are_alive_than_the_schedule_says(layout: Layout):
    schedule = schedule_of(layout)
    in_flight, waiting, buffers = zip(*run_ranks(peaks, layout.pp, layout), strict=True)
    simulated = simulate(schedule, Times())
    assert in_flight == simulated.peak_in_flight
    assert waiting == simulated.peak_waiting
    assert buffers == tuple(buffers_of(schedule))


def test_1f1b_holds_no_more_microbatches_than_there_are_ranks_from_here_on_and_their_inputs_and_two_more_buffers():
    schedule = schedule_of(Layout(pp=4))
    assert simulate(schedule, Times()).peak_in_flight == (4, 3, 2, 1)
    # Two more are the next input and a gradient; the first rank has no inputs to receive, the last no gradients.
    assert buffers_of(schedule) == [1, 5, 4, 2]


# --- what it sends


def traffic_of_two_steps(layout: Layout, spec: ModelSpec) -> list[dict[str, tuple[int, int]]]:
    """Calls and bytes of the first step after the model was built, and of the second."""
    trainer = build(layout, torch.float64, spec)
    found = []
    for step in range(2):
        with Traffic() as traffic:
            take_step(trainer, step)
        found.append({name: (traffic.calls[name], traffic.bytes[name]) for name in traffic.calls})
    return found


SENT = [
    (Layout(pp=4), False, 0),
    (Layout(pp=2, pp_schedule="interleaved-1f1b", virtual_stages=2), False, 0),
    (Layout(pp=2, pp_schedule="zb-v"), True, 0),  # both copies on one rank
    (Layout(pp=2, pp_schedule="zb-h1"), True, EVEN.vocab_size * EVEN.d_model),
    (Layout(pp=2, pp_schedule="dualpipe"), False, EVEN.n_parameters),
]


@pytest.mark.parametrize(("layout", "tied", "copies"), rest_prove(SENT, SENT[2], SENT[3]), ids=str)
def test_every_step_sends_the_messages_of_its_schedule_and_the_gradients_of_copies_and_the_first_no_more(
    layout: Layout, tied: bool, copies: int
):
    entries = with_messages(schedule_of(layout))
    found = run_ranks(traffic_of_two_steps, layout.pp, layout, replace(EVEN, tied_embedding=tied))
    for rank, ((first, second), own) in enumerate(zip(found, entries, strict=True)):
        messages = [message for entry in own if isinstance(entry, PairExchange) for message in entry.messages]
        ways = Counter("send" if message.sender == rank else "receive" for message in messages)
        expected = {
            "send": (ways["send"], ways["send"] * X),
            "recv": (ways["receive"], ways["receive"] * X),
            "small": (1, ELEMENT),  # the sum of squares
        }
        assert first == second == expected | ({"allreduce": (1, copies * ELEMENT)} if copies else {})


def test_token_shards_make_messages_smaller():
    layout = Layout(pp=2, tp=2, sequence_parallel=True)
    (first, _), *_ = run_ranks(traffic_of_two_steps, 4, layout, EVEN)
    assert first["send"] == first["recv"] == (MICROBATCHES, MICROBATCHES * X // 2)


# --- when it computed


def timelines(layout: Layout) -> list[list[tuple[Action, float, float]]]:
    """Of two steps, with an evaluation after each."""
    trainer, timeline = build(layout, torch.float64, EVEN), StepTimeline(torch.device("cpu"))
    trainer.model.observers.add(timeline)
    found = []
    for step in range(2):
        take_step(trainer, step)
        found.append([(Action(*action), start, end) for action, start, end in timeline.spans()])
        trainer.evaluate([local_batch(step, 0, 1, MICROBATCHES)])
        assert len(timeline.spans()) == len(found[-1]), "an evaluation leaves it alone"
    return found


@pytest.mark.parametrize("schedule", rest_prove(["1f1b", "zb-v", "dualpipe"], "zb-v"))
def test_the_timeline_of_a_step_has_every_action_of_the_rank_once_in_order_and_one_after_another(schedule: str):
    layout = Layout(pp=2, pp_schedule=schedule)
    ranks = schedule_of(layout).ranks
    for rank, steps in enumerate(run_ranks(timelines, 2, layout)):
        for spans in steps:
            assert [action for action, _, _ in spans] == list(ranks[rank])
            moments = [moment for _, start, end in spans for moment in (start, end)]
            assert moments == sorted(moments)
