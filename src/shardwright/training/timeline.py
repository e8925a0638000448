"""Records the times of a pipeline's actions in the run's folder, for `shardwright report`."""

from collections import deque
from pathlib import Path

import torch

from shardwright.config import RunConfig
from shardwright.layout.box import DENSE_AXES
from shardwright.parallel.model import ParallelModel
from shardwright.runs.folder import timeline_path
from shardwright.runs.records import PipelineStep, Record
from shardwright.system.files import write_whole
from shardwright.training.clock import StepTimeline
from shardwright.training.hooks import Hook, TakenStep

KEPT_STEPS = 4
"""Number of logged steps in a file. A report needs one step that all ranks have written. With 256 micro-batches of 3
ops each, a step takes about 25 kB, and a run of a million steps must not fill a disk."""


class TimelineFile(Hook):
    """The last logged steps of one rank, as `runs.records.PipelineStep`.

    The file is rewritten for each logged step and renamed, so that a reader sees a complete file. A resumed run starts
    with an empty file: its first logged step replaces the previous process's file.
    """

    def __init__(self, path: Path, rank: int, timeline: StepTimeline) -> None:
        self.path, self.rank, self.timeline = path, rank, timeline
        self._lines: deque[str] = deque(maxlen=KEPT_STEPS)

    def on_log(self, taken: TakenStep, numbers: Record) -> None:
        self.write(taken.step)

    def write(self, step: int) -> None:
        """Add the actions of the last step, number `step`. Synchronizes with the device."""
        spans = self.timeline.spans()
        zero_s = spans[0][1]
        actions = tuple((str(a), round(start - zero_s, 7), round(end - zero_s, 7)) for a, start, end in spans)
        self._lines.append(PipelineStep(step, self.rank, zero_s, actions).line())
        write_whole(self.path, "".join(self._lines).encode(), required=False)


def timeline_file(config: RunConfig, model: ParallelModel, device: torch.device, rank: int) -> TimelineFile | None:
    """Return the file for a rank of the first pipeline, which is at 0 on every axis except `pp`, or None for another
    rank. From now on the timeline observes the model.

    One pipeline is enough to measure the bubble: the others run the same actions on equal amounts of data, and all
    synchronize at the end of a step.
    """
    coordinates = model.layout.coordinates(rank)
    if model.layout.pp == 1 or any(coordinates[axis] for axis in DENSE_AXES if axis != "pp"):
        return None
    timeline = StepTimeline(device)
    model.observers.add(timeline)
    return TimelineFile(timeline_path(Path(config.out), coordinates["pp"]), coordinates["pp"], timeline)
