"""The folder of a run's checkpoints: listing, publishing and deleting checkpoints, and checking disk space."""

import shutil
from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from pathlib import Path
from typing import TypeVar

from shardwright.runs.folder import RUN_FILE, checkpoint_name, published, step_of
from shardwright.system.errors import CheckpointError
from shardwright.system.files import clear_leftover, publish_folder, remove
from shardwright.system.units import format_bytes
from shardwright.training.checkpoint.manifest import FILE_NAME as MANIFEST

T = TypeVar("T")
_PARTIAL = ".partial"
_WRITTEN = "written"
_REPLACED = f".replaced{_PARTIAL}"
_DELETED = f".deleted{_PARTIAL}"
_SLACK = 1.02  # factor for headers and the manifest, in addition to the tensors


def not_kept(before: Sequence[T], keep_last: int) -> Sequence[T]:
    """Return the complete checkpoints `before` a new one that are deleted so that `keep_last` are left."""
    return before[: max(0, len(before) + 1 - keep_last)]


class CheckpointStore:
    """RUN/checkpoints. Only one rank may call methods that change the folder, except `confirm`."""

    def __init__(self, folder: Path, keep_last: int = 1) -> None:
        self.folder = folder
        self.keep_last = keep_last
        self._kept_step = 0

    def keep(self, step: int) -> None:
        """Do not delete the checkpoint after `step` steps, which is being copied, until the next call; 0 for none."""
        self._kept_step = step

    def published(self) -> list[Path]:
        """Return the complete checkpoints in ascending order of steps."""
        return published(self.folder)

    def path_of(self, step: int) -> Path:
        """Return the path of the checkpoint after `step` steps, whether or not it exists."""
        return self.folder / checkpoint_name(step)

    def partial_of(self, step: int) -> Path:
        """Return the path of that checkpoint while it is being written."""
        return self.folder / f"{checkpoint_name(step)}{_PARTIAL}"

    def begin(self, step: int, tensor_bytes: int) -> None:
        """Check the disk space for a checkpoint of `tensor_bytes` and create an empty folder for it."""
        self.require_space(tensor_bytes)
        partial = self.partial_of(step)
        shutil.rmtree(partial, ignore_errors=True)
        (partial / _WRITTEN).mkdir(parents=True)

    def confirm(self, step: int, rank: int, text: str) -> None:
        """Record a rank's report about its part of a checkpoint in progress."""
        path = self._confirmation(step, rank)
        fresh = path.with_suffix(".tmp")
        fresh.write_text(text, encoding="utf-8")
        fresh.rename(path)

    def confirmed(self, step: int, ranks: AbstractSet[int]) -> dict[int, str]:
        """Return the reports of all of `ranks` that have one. Raises OSError if the checkpoint in progress is gone."""
        names = {path.name for path in (self.partial_of(step) / _WRITTEN).iterdir()}
        paths = {rank: self._confirmation(step, rank) for rank in ranks}
        return {rank: path.read_text(encoding="utf-8") for rank, path in paths.items() if path.name in names}

    def complete(self, step: int, manifest: str, run_toml: str) -> None:
        """Write the run file and the manifest, which comes last, next to the files of all ranks, and publish."""
        for name, text in ((RUN_FILE, run_toml), (MANIFEST, manifest)):
            (self.partial_of(step) / name).write_text(text, encoding="utf-8")
        self.publish(step)

    def publish(self, step: int) -> None:
        """Publish a finished checkpoint by one rename, then delete checkpoints that are no longer kept."""
        self.put_in_place(step)
        self.delete_others(step)

    def delete_others(self, step: int) -> None:
        """Delete checkpoints that are not kept together with the newest one, which is after `step` steps.

        Checkpoints of later steps are deleted too. They exist if the run resumed from an earlier step because they are
        damaged. If they counted for `keep_last`, this good checkpoint would be deleted instead.
        """
        published = self.published()
        index = published.index(self.path_of(step))
        for path in (*not_kept(published[:index], self.keep_last), *published[index + 1 :]):
            if step_of(path) != self._kept_step:
                # Rename first: a process killed during deletion leaves no folder with the name of a complete
                # checkpoint.
                remove(path.rename(path.with_name(path.name + _DELETED)))

    def put_in_place(self, step: int) -> Path:
        """Give a finished checkpoint its final name by one rename."""
        final = self.path_of(step)
        shutil.rmtree(self.partial_of(step) / _WRITTEN, ignore_errors=True)
        publish_folder(self.partial_of(step), final, final.with_name(final.name + _REPLACED))
        return final

    def _confirmation(self, step: int, rank: int) -> Path:
        return self.partial_of(step) / _WRITTEN / f"rank-{rank:05d}.json"

    def sweep(self) -> None:
        """Delete unfinished folders of killed processes, and restore folders that they had moved aside."""
        for path in self.folder.glob("*" + _PARTIAL):
            replaced = path.name.endswith(_REPLACED)
            clear_leftover(path, path.with_name(path.name.removesuffix(_REPLACED)) if replaced else None)

    def require_space(self, tensor_bytes: int) -> None:
        """Raise CheckpointError unless the next checkpoint fits on the disk in addition to the kept checkpoints."""
        existing = next(p for p in (self.folder, *self.folder.absolute().parents) if p.exists())
        free, needed = shutil.disk_usage(existing).free, int(tensor_bytes * _SLACK)
        if free < needed:
            kept = self.published()
            last = f"the last good one is {kept[-1]}" if kept else "none has been written yet"
            raise CheckpointError(
                f"the next checkpoint takes {format_bytes(needed)}, but {existing} has {format_bytes(free)} "
                f"free; free {format_bytes(needed - free)} more, or choose another `out`; {last}"
            )
