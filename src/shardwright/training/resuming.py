"""The checkpoints that a run can resume from: in OUT, on its hosts, and durable copies, which are fetched into OUT."""

import functools
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist

from shardwright.config import RunConfig
from shardwright.parallel.objects import gathered
from shardwright.runs.folder import CHECKPOINTS, step_of
from shardwright.system.errors import CheckpointError, DamagedError
from shardwright.system.remote import REMOTE
from shardwright.training.checkpoint.durable import DurableFolder, durable_copy, durable_folder, part_of
from shardwright.training.checkpoint.local import LocalLevel, local_level
from shardwright.training.checkpoint.state import load, together
from shardwright.training.checkpoint.store import CheckpointStore
from shardwright.training.hooks import RunStart
from shardwright.training.sources import Sources, past_stages
from shardwright.training.step import Trainer

IN_OUT, LOCAL, DURABLE = 2, 1, 0
"""Location of a checkpoint. If several have the same step, the highest number is tried first."""


class RunCheckpoints:
    """The checkpoints of a run: in OUT, on its hosts, and durable copies."""

    def __init__(self, config: RunConfig, trainer: Trainer, sources: Sources, remarks: list[str]) -> None:
        """Open the locations. Every rank calls this. Warnings are appended to `remarks`."""
        self.config, self.trainer, self.sources, self.remarks = config, trainer, sources, remarks
        self.store = CheckpointStore(Path(config.out) / CHECKPOINTS, config.checkpoint.keep_last)
        self.local = local_level(config, trainer)
        self.durable = durable_folder(config)
        if self.local is not None and self.local.remark:
            remarks.append(self.local.remark)

    def start(self) -> RunStart:
        """Load the checkpoint that the run resumes from, if any. With `auto`, damaged checkpoints are skipped."""
        resume = self.config.checkpoint.resume
        if dist.get_rank() == 0:
            self.store.sweep()
        if resume == "no":
            return RunStart()
        if resume == "auto":
            return self.newest() or RunStart()
        if REMOTE in resume:
            durable, step = durable_copy(resume)
            return self._load(fetched(durable, step, self.store))
        return self._load(Path(resume))

    def take_remarks(self) -> list[str]:
        """Return the warnings since the last call, for the log."""
        taken = list(self.remarks)
        self.remarks.clear()
        return taken

    def newest(self) -> RunStart | None:
        """Load the newest complete checkpoint, or return None if there is no checkpoint. Every rank calls this.

        Raises CheckpointError if all are damaged.
        """
        damage: list[str] = []
        for path in newest_first(self.store, self.durable, self.remarks, self.local):
            try:
                return self._load(path)
            except DamagedError as error:
                damage += error.problems
                self.remarks += [*error.problems, f"passing over {path.name}"]
        if damage:
            raise CheckpointError(
                *damage,
                f"no checkpoint in {self.store.folder} is whole, and --resume does not start a new run over "
                f"them; to start a new run, name another folder with --set out=..., or move this one away",
            )
        return None

    def _load(self, path: Path) -> RunStart:
        manifest = load(path, self.trainer, self.sources.described(self.sources.mixtures))
        progress = manifest.progress
        if progress.step > self.config.steps:
            raise CheckpointError(
                f"{path} is at step {progress.step}, beyond the steps={self.config.steps} of this run; raise steps"
            )
        reference = None if manifest.data is None else manifest.data.get("reference")
        return RunStart(progress.step, progress.samples, path, past_stages(manifest), progress.left_out, reference)


def newest_first(
    store: CheckpointStore, durable: DurableFolder | None, remarks: list[str], local: LocalLevel | None = None
) -> Iterator[Path]:
    """Yield the checkpoints in OUT, on the hosts and among durable copies in descending order of steps; for equal
    steps, OUT first, then local. Checkpoints elsewhere are fetched when reached. Every rank calls this. Warnings are
    appended to `remarks`. Raises CheckpointError if OUT has no checkpoint and the durable copies cannot be listed."""
    first = dist.get_rank() == 0
    # On a network file system, ranks may see different listings, so all ranks use rank 0's.
    published: list[Path] = gathered(store.published() if first else [], list[Path])[0]
    paths = {step_of(path): path for path in published}
    offered = [(step, IN_OUT) for step in paths] + [(step, DURABLE) for step in _copies(durable, published, remarks)]
    offered += [(step, LOCAL) for step in local.steps(remarks)] if local is not None else []
    for step, where in sorted(offered, reverse=True):
        if where == IN_OUT:
            yield paths[step]
        elif where == LOCAL and local is not None:
            yield local.brought(step)
        elif durable is not None and from_first(functools.partial(durable.is_complete, step), bool):
            remarks.append(f"fetching {durable.url_of(step)}")
            yield fetched(durable, step, store)


def fetched(durable: DurableFolder, step: int, store: CheckpointStore) -> Path:
    """Fetch a durable copy into OUT, each rank a part of the files; every rank calls this. Raises CheckpointError on
    all ranks."""
    rank, partial = dist.get_rank(), store.partial_of(step)
    files: dict[str, int] = from_first(lambda: durable.files(step), dict[str, int])
    together(lambda: store.begin(step, sum(files.values())), _failed, rank=0)

    def fetch() -> None:
        for name in part_of(rank, dist.get_world_size(), list(files)):
            durable.fetch(step, name, partial)

    together(fetch, _failed)
    together(lambda: store.put_in_place(step), _failed, rank=0)
    return store.path_of(step)


def _copies(durable: DurableFolder | None, published: Sequence[Path], remarks: list[str]) -> list[int]:
    """Return the steps of the durable copies."""
    if durable is None:
        return []

    def listed() -> list[int]:
        try:
            return durable.steps()
        except CheckpointError as error:
            if not published:
                raise
            remarks.append(f"the durable copies cannot be listed, and are passed over: {error}")
            return []

    steps: list[int] = from_first(listed, list[int])
    return steps


def from_first(ask: Callable[[], Any], kind: Any) -> Any:
    """Return rank 0's result of `ask`, of type `kind`, on every rank. An error on rank 0 is raised on every rank."""
    results: list[Any] = []
    together(lambda: results.append(ask()), _failed, rank=0)
    return gathered(results[0] if results else None, kind | None)[0]


def _failed(error: Exception) -> CheckpointError:
    return CheckpointError(f"rank {dist.get_rank()}: {error}")
