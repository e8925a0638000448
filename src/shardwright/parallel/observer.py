"""The observer of a rank: reports what runs now, and the tensors that go to another memory or rank.

The parts of a run report to the `Observers` of their model, the only place where a listener is added. Without a
listener an event costs its tuple, the context manager of `during` and a loop over an empty list. No event is reported
for a single operator.

| event             | what happens                                                | reported by                       |
| ----------------- | ----------------------------------------------------------- | --------------------------------- |
| `StepPhase`       | a phase of a step                                           | `TrainLoop`, `Trainer`,           |
|                   |                                                             | `SaveCheckpoints`, evaluation,    |
|                   |                                                             | `training/references.py`          |
| `StepPasses`      | the passes of a training step, and the reduction after them | runner of micro-batches           |
| `Action`          | an action of a pass, after the wait for its input: in       | runner of micro-batches           |
|                   | `StepPasses`, or F of a pass without gradients              |                                   |
| `MessageWait`     | the rank waits for the input of an action                   | `PipelineMessages`                |
| `HostUpdate`      | the host updates a bucket of parameters                     | `OptimizerOnHost`                 |
| `DiskUpdate`      | a chunk of states is read, updated and written              | `OptimizerOnDisk`                 |
| `TensorCopy`      | tensors are copied between the host and the device          | `ActivationsOnHost`, `HostLink`   |
| `PostedMessage`   | a message of the pipeline is about to start                 | `PipelineMessages`                |
| `ReceivedMessage` | a message of the pipeline has arrived and is decoded        | `PipelineMessages`                |

FSDP2 gathers and reduces inside of PyTorch, so it reports nothing here (`torch_private.observed_shards`).
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Literal, NamedTuple

from torch import Tensor

from shardwright.parallel.microbatch import Microbatch
from shardwright.schedule.actions import Action
from shardwright.system.ranks_at import Phase

Need = tuple[int, Literal["F", "B"], int]
"""(stage, op, micro-batch): the input of the stage for F, the gradient of its output for B."""


class StepPhase(NamedTuple):
    """A phase. `step`: number of the step (0-based); for "checkpoint", "evaluation" and "agreement", completed steps.

    "log" and "agreement" have no end: the next phase ends them. "data" may start several times while it waits, and
    "evaluation" starts for each micro-batch of reference log-probabilities; both end once."""

    phase: Phase
    step: int


class StepPasses(NamedTuple):
    """The passes of a training step."""

    microbatches: Sequence[Microbatch]


class MessageWait(NamedTuple):
    """The wait for the message of the pipeline that `action` needs, before the message is decoded."""

    action: Action

    @property
    def need(self) -> Need:
        return self.action.stage, "F" if self.action.op == "F" else "B", self.action.microbatch


class HostUpdate(NamedTuple):
    """The update of a bucket of parameters, which the host computes."""


class DiskUpdate(NamedTuple):
    """The update of a chunk of states: `n_bytes` in the file; the states use `used_bytes`."""

    n_bytes: int
    used_bytes: int


class TensorCopy(NamedTuple):
    """A copy to the host, or from the host to the device. `activations`: the new tensor, if activations are copied; the
    copy starts after the event, so its contents are undefined during the event."""

    to_host: bool
    n_bytes: int
    activations: Tensor | None = None


class PostedMessage(NamedTuple):
    """A message of the pipeline from rank `sender` of `pp`. `tensor`: its contents on that rank, elsewhere None."""

    need: Need
    sender: int
    tensor: Tensor | None


class ReceivedMessage(NamedTuple):
    """The decoded contents of a message."""

    need: Need
    tensor: Tensor


Running = StepPhase | StepPasses | Action | MessageWait | HostUpdate | DiskUpdate
Transfer = TensorCopy | PostedMessage | ReceivedMessage


class Observer:
    """Receives the events of a rank. Every method does nothing unless a subclass overrides it."""

    def begin(self, running: Running) -> None:
        """Something starts."""

    def end(self, running: Running) -> None:
        """It has ended. Not called after an error."""

    def transfer(self, transfer: Transfer) -> None:
        """Tensors are copied, sent or received."""

    @contextmanager
    def during(self, running: Running) -> Iterator[None]:
        """Report the start and the end of the block."""
        self.begin(running)
        yield
        self.end(running)


NO_OBSERVER = Observer()


class Observers(Observer):
    """Passes each event to every added observer."""

    def __init__(self) -> None:
        self._observers: list[Observer] = []

    def add(self, observer: Observer) -> None:
        """Pass the events from now on to `observer` too."""
        self._observers.append(observer)

    @contextmanager
    def joined(self, observer: Observer) -> Iterator[None]:
        """Pass the events of the block to `observer` too."""
        self.add(observer)
        try:
            yield
        finally:
            self._observers.remove(observer)

    def begin(self, running: Running) -> None:
        for observer in self._observers:
            observer.begin(running)

    def end(self, running: Running) -> None:
        for observer in self._observers:
            observer.end(running)

    def transfer(self, transfer: Transfer) -> None:
        for observer in self._observers:
            observer.transfer(transfer)
