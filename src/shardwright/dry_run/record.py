"""What one rank does in a step: its actions in order, the tensors that it allocates, and its messages. No torch.

A record holds numbers and names alone, so that it can be sent to another process, compared and written to a file.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

KINDS = (
    "parameters",
    "gathered",
    "gradients",
    "states",
    "activations",
    "communication",
    "temporaries",
)
"""The kinds of memory. `gathered`: whole parameters of FSDP in the compute type; `states`: of the optimizer;
`activations`: what a forward pass leaves for the backward pass; `communication`: buffers of collectives and messages;
`temporaries`: what is freed within its action."""

WAIT = "wait"
"""The operation of an entry that is no message: the rank waits for a message whose receive it has started."""


TO_HOST, TO_DEVICE, LINK = "copy to the host", "copy to the device", "link"
READ, WRITE, DISK = "read", "write", "disk"
"""What a rank copies between its device and the memory of the host, and reads from and writes to a disk: operations of
messages, and the axes that these have."""


class RecordedMessage(NamedTuple):
    """A collective, a send or receive of a message, or a copy to or from the host or a disk.

    `ranks`: the process group, by number in the world; `axis`: the axes of the layout along which these differ;
    `n_bytes`: of the larger of the tensors given to it, of an all-to-all of equal parts without the rank's own as if
    that were there; `shapes`: of all of them; `splits`: rows to and from each rank of an uneven all-to-all, of a wait
    the number of the message among those from `peer`; `peer`: the other rank of a send, receive or wait, in the world;
    `launch`: messages that follow each other with the same number are one `batch_isend_irecv`; 0 for one alone.
    """

    op: str
    axis: str
    ranks: tuple[int, ...]
    n_bytes: int
    dtype: str
    shapes: tuple[tuple[int, ...], ...]
    action: str
    module: str
    splits: tuple[int, ...] = ()
    peer: int = -1
    launch: int = 0

    @property
    def group(self) -> tuple[str, tuple[int, ...]]:
        """The process group: the axis and its ranks."""
        return self.axis, self.ranks

    @property
    def content(self) -> tuple[object, ...]:
        """What all ranks of a collective have to agree on."""
        return self.op, self.n_bytes, self.dtype, self.shapes if not self.splits else ()

    @property
    def words(self) -> str:
        """Operation, axis, type, shapes, module and action."""
        if self.op == WAIT:
            return f"wait for {self.module} from rank {self.peer} in {self.action}"
        shapes = ", ".join(" x ".join(map(str, shape)) or "scalar" for shape in self.shapes)
        rows = f", rows {self.splits[len(self.ranks) + 1 :]} to each rank" if self.splits else ""
        return (
            f"{self.op} over {self.axis} of {self.dtype} {shapes}{rows}, in {self.module or 'no module'}, {self.action}"
        )


@dataclass(slots=True)
class Allocation:
    """A storage. `sizes`: (time, bytes) whenever its size changed, the first when it was made; the last is 0 once it is
    freed. `op`, `module`, `action`: what made it; `line`: the innermost line that ran outside of PyTorch, which in the
    backward pass of PyTorch's own operations is the one that started it."""

    op: str
    module: str
    action: str
    shape: tuple[int, ...]
    dtype: str
    sizes: list[tuple[int, int]]
    kind: str = ""
    line: str = ""


class PeakTensor(NamedTuple):
    """A tensor that is alive at the peak."""

    n_bytes: int
    kind: str
    shape: tuple[int, ...]
    dtype: str
    op: str
    module: str
    action: str
    line: str


class Moment(NamedTuple):
    """Bytes that are alive at one moment, by kind; `action` and `module` run, `op` has allocated last."""

    kinds: dict[str, int]
    action: str
    module: str
    op: str

    @property
    def n_bytes(self) -> int:
        """Sum of all kinds."""
        return sum(self.kinds.values())


@dataclass(frozen=True)
class History:
    """Everything that a rank did in the step, in the order of time, which is counted in operations. `actions`: (time at
    which it began, action); `message_times`: of the messages of the record; `end`: the last time."""

    allocations: tuple[Allocation, ...]
    actions: tuple[tuple[int, str], ...]
    message_times: tuple[int, ...]
    end: int


@dataclass(frozen=True)
class RankRecord:
    """A step of one rank. `curve`: of each action in order the moment with the most bytes; `peak`: of the whole step;
    `largest`: the tensors of most bytes that are alive at the peak; `flops`: of matmuls and attention, by operation;
    `peak_of_kinds`: of each kind its own largest sum, which may be at another moment. `repeats`: how many micro-batches
    an action stands for, where it is not 1: without a pipeline all between the first and the last do the same, and one
    of them is run; `flops` counts all. `history`: where it was asked for. `host_bytes`: the most that is at once in the
    memory of the host, where that is not the memory of the device; no kind includes them."""

    rank: int
    curve: tuple[Moment, ...]
    peak: Moment
    peak_of_kinds: dict[str, int]
    largest: tuple[PeakTensor, ...]
    messages: tuple[RecordedMessage, ...]
    flops: dict[str, int] = field(default_factory=dict)
    repeats: dict[str, int] = field(default_factory=dict)
    history: History | None = None
    host_bytes: int = 0

    @property
    def sent(self) -> "dict[tuple[str, str], AxisTraffic]":
        """Number and bytes of the messages, by axis and operation."""
        return traffic(self.messages, self.repeats)


class AxisTraffic(NamedTuple):
    """Messages of one operation along one axis."""

    calls: int
    n_bytes: int


def traffic(messages: Iterable[RecordedMessage], repeats: Mapping[str, int]) -> dict[tuple[str, str], AxisTraffic]:
    """Number and bytes of messages, by axis and operation, in the order in which these come first."""
    calls: Counter[tuple[str, str]] = Counter()
    n_bytes: Counter[tuple[str, str]] = Counter()
    for message in messages:
        if message.op != WAIT:
            times = repeats.get(message.action, 1)
            calls[message.axis, message.op] += times
            n_bytes[message.axis, message.op] += times * message.n_bytes
    return {key: AxisTraffic(calls[key], n_bytes[key]) for key in calls}


N_LARGEST = 10


def summed(
    allocations: Sequence[Allocation], actions: Sequence[tuple[int, str]]
) -> tuple[tuple[Moment, ...], Moment, dict[str, int], tuple[PeakTensor, ...]]:
    """The curve, the peak, the peaks of kinds and the largest tensors of a `RankRecord`; `actions`: (time at which it
    began, action)."""
    ordered = sorted(changes(allocations))
    curve: list[Moment] = []
    now = dict.fromkeys(KINDS, 0)
    tops = dict(now)
    peak_at, peak_bytes, place = 0, -1, 0
    last = Allocation("", "", "", (), "", [])
    ends = [*(time for time, _ in actions[1:]), float("inf")]
    for (_, action), end in zip(actions, ends, strict=True):
        best = Moment(dict(now), action, last.module, last.op)
        while place < len(ordered) and ordered[place][0] < end:
            time, number, delta = ordered[place]
            place += 1
            last = allocations[number]
            now[last.kind] += delta
            tops[last.kind] = max(tops[last.kind], now[last.kind])
            if (total := sum(now.values())) > best.n_bytes:
                best = Moment(dict(now), action, last.module, last.op)
            if total > peak_bytes:
                peak_at, peak_bytes = time, total
        curve.append(best)
    return tuple(curve), max(curve, key=lambda moment: moment.n_bytes), tops, tuple(_largest(allocations, peak_at))


def changes(allocations: Sequence[Allocation]) -> Iterator[tuple[int, int, int]]:
    """(time, number of the storage, bytes that are added), not in the order of time."""
    for number, each in enumerate(allocations):
        held = 0
        for time, n_bytes in each.sizes:
            yield time, number, n_bytes - held
            held = n_bytes


def _largest(allocations: Sequence[Allocation], time: int) -> Iterator[PeakTensor]:
    alive = []
    for each in allocations:
        n_bytes = next((size for at, size in reversed(each.sizes) if at <= time), 0)
        if n_bytes:
            alive.append(
                PeakTensor(n_bytes, each.kind, each.shape, each.dtype, each.op, each.module, each.action, each.line)
            )
    yield from sorted(alive, key=lambda block: -block.n_bytes)[:N_LARGEST]
