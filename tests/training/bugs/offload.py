"""Bugs of optimizer states on a disk: a chunk that is not the one meant, and what is not written back."""

from dataclasses import replace

from tests.mutation import Mutation
from tests.training.bugs.bug import ONE, TP, ZERO_3, AnyBug, Bug, ResumeBug

_STATES, _ON_DISK = "shardwright.training.offload.states", "shardwright.training.offload.on_disk"
_ONE, _TP, _ZERO_3 = (replace(layout, offload_optimizer="disk") for layout in (ONE, TP, ZERO_3))
_READER = "shardwright.training.checkpoint.storage:SafetensorsReader.read"

SHARD: dict[str, AnyBug] = {
    "states on a disk are read from the place of the chunk before": Bug(
        Mutation(
            f"{_STATES}:StatesOnDisk._read_ahead",
            "self.chunks[number].begin",
            "self.chunks[max(number - 1, 0)].begin",
        ),
        [_ONE, _ZERO_3],
    ),
    "a box of a state is put at the start of the shard on a disk": ResumeBug(
        Mutation(f"{_STATES}:StoredTensor.write", "slice(at, at + size)", "slice(0, size)"), (ZERO_3, _ONE)
    ),
    "the pieces of a state are all saved as its first elements": ResumeBug(
        Mutation(
            f"{_STATES}:StoredTensor.read",
            "self._states.read(at, flat[first : first + count])",
            "self._states.read(at, flat[:count])",
        ),
        (_ONE, _ONE),
    ),
}
STALE: dict[str, AnyBug] = {
    "a chunk of states is read into a buffer that is in use": Bug(
        Mutation(f"{_STATES}:StatesOnDisk._part", "number % BUFFERS", "number % (BUFFERS - 1)"), [_ONE, _TP]
    ),
    "weights beside states on a disk are updated in a copy": Bug(
        Mutation(
            f"{_ON_DISK}:_shard_of",
            "local_part(parameter.detach()).view(-1)[part]",
            "local_part(parameter.detach()).view(-1)[part].clone()",
        ),
        [_ONE, _ZERO_3],
    ),
    "each piece of a parameter advances its step count": Bug(
        Mutation(f"{_ON_DISK}:OptimizerOnDisk._update", "number.clone()", "number"), [_ONE]
    ),
}
OFF_BY_ONE: dict[str, AnyBug] = {
    "the last chunk of states is not written": Bug(
        Mutation(
            f"{_STATES}:StatesOnDisk.in_turn",
            "self._writes.append(self._thread.submit(self.file.write, chunk.begin, self._part(number), direct=True))",
            "if number + 1 < len(self.chunks):\n    self._writes.append("
            "self._thread.submit(self.file.write, chunk.begin, self._part(number), direct=True))",
        ),
        [_ONE, _TP],
    ),
    "what is left of a parameter at the end of a chunk is in none": Bug(
        Mutation(f"{_STATES}:in_chunks", "first += count", "first = numel"), [_ONE]
    ),
}
RESUME: dict[str, AnyBug] = {
    "states of a checkpoint are not written to the disk": ResumeBug(
        Mutation(_READER, "stored.write(tuple(part.start for part in target), shard[source])", "pass"), (_ONE, _ONE)
    ),
}
