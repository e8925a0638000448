"""Data parallelism of pipeline stages: when gradients that arrive microbatch by microbatch are reduced.

P, G are the bytes of a stage's parameters and gradients, A its microbatches in a step, K its groups of parameters: L
layers, and in the first stage and the last one more, with embedding or head.

| zero              | held between microbatches    | all-gathers | reductions of gradients               |
| ----------------- | ---------------------------- | ----------- | ------------------------------------- |
| 0                 | P, G whole                   | -           | 1 all-reduce, with the last           |
| 1                 | P and G whole, P share       | K           | K reduce-scatters, with the last      |
| 2                 | P whole, P and G share       | K           | A x K reduce-scatters                 |
| 3, "step"         | P and G whole, P share       | K           | K reduce-scatters, with the last      |
| 3, "microbatch"   | P and G share                | A x (K + L) | A x K reduce-scatters                 |

Under 3 `layout.zero_pp_gather` chooses: "step" gathers each parameter once and holds the stage whole until its last
backward pass, which is a p-th of the model; "microbatch" frees a layer after each pass, as without a pipeline, and
embedding or head after each backward pass.
"""

from collections.abc import Iterable
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import nn

from shardwright.layout import Layout
from shardwright.parallel.data import Sharded


class StageEngine(Protocol):
    """What a pipeline stage asks of data parallelism. Its microbatches overlap: several are forward before the first is
    backward, and the gradients of one may come in two halves."""

    keeps_gradients: bool
    """As `DataEngine`."""

    def before_backward(self, complete: bool, last: bool) -> None:
        """Before a backward pass. `complete`: it gives all gradients of its microbatch, so that those of weights do
        not come later. `last`: with it, the gradients of the step are complete."""

    def after_backward(self, last: bool) -> None:
        """After a complete one."""

    def after_weights(self, last: bool) -> None:
        """After the second half of one that was not complete."""

    def end_step(self) -> None:
        """After the last action."""

    def release(self) -> None:
        """As `DataEngine`."""


class StageReplicas:
    """ZeRO-0 of a stage: its gradients are summed over the ranks that have the same stage, in one all-reduce that
    starts when they are complete and runs while other stages of this rank compute."""

    def __init__(self, parameters: Iterable[nn.Parameter], group: dist.ProcessGroup | None) -> None:
        """`parameters` are plain, and there already; without a group nothing is sent."""
        self.group = group
        self.keeps_gradients = group is not None
        self._work: Any = None
        if group is not None:
            held = list(parameters)
            self._bucket = torch.cat([torch.zeros_like(parameter).flatten() for parameter in held])
            parts = self._bucket.split([parameter.numel() for parameter in held])
            for parameter, part in zip(held, parts, strict=True):
                parameter.grad = part.view_as(parameter)

    def before_backward(self, complete: bool, last: bool) -> None:
        pass

    def after_backward(self, last: bool) -> None:
        if last and self.group is not None:
            self._work = dist.all_reduce(self._bucket, group=self.group, async_op=True)

    after_weights = after_backward

    def end_step(self) -> None:
        if self._work is not None:
            self._work.wait()
            self._work = None

    def release(self) -> None:
        pass


class StageShards:
    """ZeRO-1, -2 and -3 of a stage: FSDP2. Where a backward pass is in two halves its hooks come too early, so
    reduction is asked for when the second is done."""

    keeps_gradients = False

    def __init__(self, shards: Sharded, layout: Layout) -> None:
        self.groups = shards.groups
        self.regather = layout.regathers
        self.each_microbatch = layout.zero == 2 or layout.regathers
        self.partial_sums = self.each_microbatch and layout.dp_replicate > 1

    def before_backward(self, complete: bool, last: bool) -> None:
        self._set(reduce=complete and (last or self.each_microbatch), last=complete and last)

    def after_backward(self, last: bool) -> None:
        pass

    def after_weights(self, last: bool) -> None:
        self._set(reduce=last or self.each_microbatch, last=last)
        states = [group._get_fsdp_state() for group in self.groups]
        for state in reversed(states):
            for parameters in state._fsdp_param_groups:
                # What came in the first half has been widened to the type of reduction; what came now has not.
                for parameter in parameters.fsdp_params:
                    none = parameter.unsharded_accumulated_grad is None and parameter.unsharded_param.grad is None
                    if none and self.partial_sums:
                        # Until the last microbatch FSDP2 adds up one flat tensor, which has to be of all parameters.
                        parameter.unsharded_param.grad = torch.zeros_like(parameter.unsharded_param)
                    parameter.accumulate_unsharded_grad_if_needed()
                    parameter.to_accumulated_grad_if_needed()
                parameters.post_backward()
        states[0]._root_post_backward_final_callback()

    def _set(self, reduce: bool, last: bool) -> None:
        root = self.groups[0]  # these three reach the groups below it
        # Unless the last backward reshards, the next forward runs on parameters from before the update.
        root.set_reshard_after_backward(last or self.regather)
        root.set_requires_gradient_sync(reduce)
        root.set_requires_all_reduce(last)

    def end_step(self) -> None:
        pass

    def release(self) -> None:
        for group in self.groups:
            group.reshard()
