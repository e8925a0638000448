"""Pipeline parallelism: a schedule of `shardwright.schedule`, run by PyTorch's pipelining runtime.

The runtime walks this rank's list of actions and messages. What an action does is here: `Stage` computes, keeps what
its backward pass needs, and sends. Buffers are as many as microbatches are in flight, shapes are known from the
microbatches, and nothing is exchanged before the first step.

DualPipe has each stage on two ranks. To the runtime those are two pipelines, one of each half of the microbatches,
whose stages it knows by separate numbers.

Shapes: B batch, T tokens (or a token shard of them), D model.
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.pipelining.schedules import _Action, _ComputationType, _PipelineScheduleRuntime

from shardwright.parallel.run import Loss, Microbatch
from shardwright.parallel.stage import StageModel
from shardwright.parallel.stage_data import StageEngine
from shardwright.parallel.timeline import Timeline
from shardwright.schedule.actions import Action, Schedule
from shardwright.schedule.forward import forward_only
from shardwright.schedule.messages import Message, with_messages
from shardwright.schedule.placement import way_of


class Stage:
    """A stage as the runtime drives it; the names and arguments of the methods are PyTorch's.

    `mb_index` is the number of a microbatch in the step. `way` is the pipeline of DualPipe it belongs to.
    """

    def __init__(
        self, model: StageModel, engine: StageEngine, way: int, n_stages: int, group: dist.ProcessGroup
    ) -> None:
        self.model, self.engine, self.way, self.group = model, engine, way, group
        self.is_first, self.is_last = model.first, model.last
        # One number between the pipelines is left out: the end of one is no neighbour of the start of the next.
        self.stage_index = model.number + way * (n_stages + 1)
        self.num_stages, self.group_size, self.group_rank = n_stages, group.size(), group.rank()
        self.submod = None  # whose sharding the runtime would see to
        self.has_backward = True
        self.sent: deque[tuple[dist.Work, Tensor]] = deque()

    def begin_step(
        self,
        schedule: Schedule,
        training: bool,
        loss: Callable[[Tensor, int], Tensor],
        like_BTD: Tensor,
        timeline: Timeline,
    ) -> None:
        """Before the first action. `loss` is of logits and the number of their microbatch; `like_BTD` has the shape and
        type of what goes between stages."""
        self.schedule, self.has_backward, self.loss = schedule, training, loss
        self.like_BTD, self.timeline = like_BTD, timeline
        self.total = torch.zeros((), dtype=torch.float64, device=like_BTD.device)
        self.left = sum(schedule.place[self.model.number, i] == self.group_rank for i in range(schedule.n_microbatches))
        self.inputs: dict[int, Tensor] = {}
        self.kept: dict[int, tuple[Tensor | None, Tensor]] = {}
        self.output_gradients: dict[int, Tensor] = {}
        self.input_gradients: dict[int, Tensor] = {}
        self.weights: dict[int, Callable[[], None]] = {}

    def end_step(self) -> None:
        """After the last action: wait for what is still on its way."""
        while self.sent:
            self.sent.popleft()[0].wait()
        self.engine.end_step()

    def forward_one_chunk(
        self, mb_index: int, args: tuple[Tensor], kwargs: dict[str, Any], save_forward_output: bool = True
    ) -> Tensor:
        x = args[0] if self.is_first else self.inputs.pop(mb_index)
        with self.timeline.action(Action(self.model.number, "F", mb_index)):
            output: Tensor = self.model(x, **kwargs)
            if self.is_last:
                output = self.loss(output, mb_index)
                self.total += output.detach()
        if self.has_backward or not self.is_last:
            self.kept[mb_index] = (None if self.is_first else x, output)
        return output

    def backward_one_chunk(
        self, mb_index: int, loss: None = None, full_backward: bool = True, last_backward: bool = False
    ) -> None:
        x, output = self.kept.pop(mb_index)
        with self.timeline.action(Action(self.model.number, "B" if full_backward else "I", mb_index)):
            if full_backward:
                self.left -= 1
            self.engine.before_backward(complete=full_backward, last=self.left == 0)
            with nullcontext() if full_backward else self.model.gradients.hold():
                torch.autograd.backward(output, self.output_gradients.pop(mb_index, None))
            if x is not None:
                assert x.grad is not None
                self.input_gradients[mb_index] = x.grad
            if full_backward:
                self.engine.after_backward(last=self.left == 0)
            else:
                self.weights[mb_index] = self.model.gradients.take()

    def backward_weight_one_chunk(self, mb_index: int, last_backward: bool = False) -> None:
        with self.timeline.action(Action(self.model.number, "W", mb_index)):
            self.left -= 1
            self.weights.pop(mb_index)()
            self.engine.after_weights(last=self.left == 0)

    def get_fwd_send_ops(self, mb_index: int) -> list[dist.P2POp]:
        output = self.kept[mb_index][1] if self.has_backward else self.kept.pop(mb_index)[1]
        assert output is not None
        self._send(output.detach(), self.schedule.place[self.model.number + 1, mb_index])
        return []

    def get_bwd_send_ops(self, mb_index: int) -> list[dist.P2POp]:
        self._send(self.input_gradients.pop(mb_index), self.schedule.place[self.model.number - 1, mb_index])
        return []

    def _send(self, tensor: Tensor, peer: int) -> None:
        """The line that sends the bytes. The runtime would hold what it sends until the step ends; this lets it go
        when it has left."""
        tensor = tensor.contiguous()
        work = dist.isend(tensor, group=self.group, group_dst=peer)
        assert work is not None
        self.sent.append((work, tensor))
        while self.sent and self.sent[0][0].is_completed():
            self.sent.popleft()

    def get_fwd_recv_ops(self, mb_index: int) -> list[dist.P2POp]:
        self.inputs[mb_index] = torch.empty_like(self.like_BTD).requires_grad_(self.has_backward)
        return [self._receive(self.inputs[mb_index].detach(), self.schedule.place[self.model.number - 1, mb_index])]

    def get_bwd_recv_ops(self, mb_index: int) -> list[dist.P2POp]:
        self.output_gradients[mb_index] = torch.empty_like(self.like_BTD)
        return [self._receive(self.output_gradients[mb_index], self.schedule.place[self.model.number + 1, mb_index])]

    def _receive(self, tensor: Tensor, peer: int) -> dist.P2POp:
        return dist.P2POp(dist.irecv, tensor, group=self.group, group_peer=peer)

    # Between two stages of one rank nothing is sent.
    def set_local_fwd_input(self, prev_stage_outputs: Tensor, mb_index: int) -> None:
        self.inputs[mb_index] = prev_stage_outputs.detach().requires_grad_(self.has_backward)

    def get_local_bwd_output(self, mb_index: int) -> Tensor:
        return self.input_gradients.pop(mb_index)

    def set_local_bwd_input(self, next_stage_bwd_outputs: Tensor, mb_index: int) -> None:
        self.output_gradients[mb_index] = next_stage_bwd_outputs


class _Runtime(_PipelineScheduleRuntime):
    """PyTorch's runtime on stages of ours, which know their shapes and compute the loss themselves."""

    def __init__(
        self, stages: Sequence[Stage], schedule: Schedule, ways: tuple[tuple[int, ...], ...], rank: int
    ) -> None:
        super().__init__(list(stages), schedule.n_microbatches, scale_grads=False)
        self.stages, self.schedule = stages, schedule
        self.pipeline_order_with_comms = {rank: list(_steps(schedule, ways, rank))}

    def run(self, microbatches: Sequence[Microbatch]) -> None:
        """All actions of this rank."""
        self._step_microbatches(
            [(each.tokens_BT,) for each in microbatches],
            [{"positions_T": each.positions_T, "dropout_keys_B": each.dropout_keys_B} for each in microbatches],
            return_outputs=False,
        )

    def _initialize_stages(self, *_: Any, **__: Any) -> None:
        pass

    def _maybe_compute_loss(self, *_: Any, **__: Any) -> None:
        pass

    def _maybe_get_loss(self, *_: Any) -> None:
        return None


_OPS = {
    "F": _ComputationType.FORWARD,
    "B": _ComputationType.FULL_BACKWARD,
    "I": _ComputationType.BACKWARD_INPUT,
    "W": _ComputationType.BACKWARD_WEIGHT,
}
_MESSAGES = {
    ("send", "F"): _ComputationType.SEND_F,
    ("send", "B"): _ComputationType.SEND_B,
    ("receive", "F"): _ComputationType.RECV_F,
    ("receive", "B"): _ComputationType.RECV_B,
}


def _steps(schedule: Schedule, ways: tuple[tuple[int, ...], ...], rank: int) -> Iterator[_Action]:
    """This rank's actions and messages in PyTorch's words."""
    for each in with_messages(schedule)[rank]:
        kind = _MESSAGES[each.way, each.op] if isinstance(each, Message) else _OPS[each.op]
        number = each.stage + way_of(schedule, ways, each.microbatch) * (schedule.n_stages + 1)
        yield _Action(number, kind, each.microbatch)


class Pipeline:
    """Runs the microbatches of a step through the stages of all ranks of `pp`."""

    def __init__(
        self,
        stages: Sequence[Stage],
        build: Callable[[int], Schedule],
        ways: tuple[tuple[int, ...], ...],
        group: dist.ProcessGroup,
        activation: Callable[[Tensor], Tensor],
        device: torch.device,
    ) -> None:
        """`build` gives the schedule of a number of microbatches; `activation`, from token ids (B, T), an empty tensor
        like what goes between stages; `ways` as of `schedule.placement.paths`."""
        self.stages, self.ways, self.group = stages, ways, group
        self.build, self.activation = build, activation
        self.keeps_gradients = any(stage.engine.keeps_gradients for stage in stages)
        self.timeline = Timeline(device)
        self._runtimes: dict[tuple[bool, int], _Runtime] = {}

    def train(self, microbatches: Sequence[Microbatch], loss: Loss) -> Tensor:
        """As `Runner.train`."""
        return self._run(microbatches, loss, training=True)

    def evaluate(self, microbatches: Sequence[Microbatch], loss: Loss) -> Tensor:
        """As `Runner.evaluate`."""
        return self._run(microbatches, loss, training=False)

    def release(self) -> None:
        """As `Runner.release`."""
        for stage in self.stages:
            stage.engine.release()

    def _run(self, microbatches: Sequence[Microbatch], loss: Loss, training: bool) -> Tensor:
        runtime = self._runtime(training, len(microbatches))
        like_BTD = self.activation(microbatches[0].tokens_BT)
        timeline = self.timeline if training else Timeline(self.timeline.device)  # whose marks nobody reads
        timeline.begin_step()
        for stage in runtime.stages:
            stage.begin_step(
                runtime.schedule,
                training,
                lambda logits_BTV, i: loss(logits_BTV, microbatches[i].targets_BT),
                like_BTD,
                timeline,
            )
        runtime.run(microbatches)
        for stage in runtime.stages:
            stage.end_step()
        return torch.stack([stage.total for stage in runtime.stages]).sum()

    def _runtime(self, training: bool, n_microbatches: int) -> _Runtime:
        key = training, n_microbatches
        if key not in self._runtimes:
            if training:
                schedule, stages = self.build(n_microbatches), list(self.stages)
            else:
                schedule = forward_only(self.ways[0], self.group.size(), n_microbatches)
                stages = [stage for stage in self.stages if stage.way == 0]
            self._runtimes[key] = _Runtime(stages, schedule, self.ways, self.group.rank())
        return self._runtimes[key]
