"""The folder of a run's checkpoints: which there are, publishing and deleting them, room on the disk."""

import shutil
from pathlib import Path

from shardwright.run_folder import checkpoint_name, published, step_of
from shardwright.system.errors import CheckpointError
from shardwright.system.files import clear_leftover, publish_folder, remove
from shardwright.system.units import format_bytes

_PARTIAL = ".partial"
WRITTEN = "written"
"""The folder in one that is being written, by which rank 0 knows which ranks are done (`shards`)."""
_REPLACED = f".replaced{_PARTIAL}"
_DELETED = f".deleted{_PARTIAL}"
_SLACK = 1.02  # headers and the manifest, beyond the tensors themselves


class CheckpointStore:
    """RUN/checkpoints. Methods that change the folder are for one rank alone."""

    def __init__(self, folder: Path, keep_last: int = 1) -> None:
        self.folder = folder
        self.keep_last = keep_last
        self._kept_step = 0

    def keep(self, step: int) -> None:
        """Do not delete the checkpoint after `step` steps, which is being copied elsewhere, until the next call; 0
        names none."""
        self._kept_step = step

    def published(self) -> list[Path]:
        """Whole checkpoints, the oldest first."""
        return published(self.folder)

    def path_of(self, step: int) -> Path:
        """Where the checkpoint after `step` steps is, or will be."""
        return self.folder / checkpoint_name(step)

    def partial_of(self, step: int) -> Path:
        """Where it is while it is being written."""
        return self.folder / f"{checkpoint_name(step)}{_PARTIAL}"

    def begin(self, step: int, tensor_bytes: int) -> None:
        """Make room for a checkpoint of `tensor_bytes` and an empty folder to write it in."""
        self.require_space(tensor_bytes)
        partial = self.partial_of(step)
        shutil.rmtree(partial, ignore_errors=True)
        (partial / WRITTEN).mkdir(parents=True)

    def publish(self, step: int) -> None:
        """Give a finished checkpoint its name, by one rename, then delete those that are no longer kept."""
        self.put_in_place(step)
        self.delete_others(step)

    def delete_others(self, step: int) -> None:
        """Delete what is not kept beside the newest checkpoint, that after `step` steps.

        Those of later steps go too: the run went back behind them, because they are damaged, and if they
        counted as the last ones this good one would be deleted in their place.
        """
        published = self.published()
        here = published.index(self.path_of(step))
        for path in (*published[: max(0, here + 1 - self.keep_last)], *published[here + 1 :]):
            if step_of(path) != self._kept_step:
                # Renamed first: a process killed in the middle leaves no folder with the name of a whole checkpoint.
                remove(path.rename(path.with_name(path.name + _DELETED)))

    def put_in_place(self, step: int) -> Path:
        """Give a finished checkpoint its name, by one rename."""
        final = self.path_of(step)
        shutil.rmtree(self.partial_of(step) / WRITTEN, ignore_errors=True)
        publish_folder(self.partial_of(step), final, final.with_name(final.name + _REPLACED))
        return final

    def sweep(self) -> None:
        """Delete what processes that were killed left half-written, and put back what they had moved
        aside."""
        for path in self.folder.glob("*" + _PARTIAL):
            replaced = path.name.endswith(_REPLACED)
            clear_leftover(path, path.with_name(path.name.removesuffix(_REPLACED)) if replaced else None)

    def require_space(self, tensor_bytes: int) -> None:
        """Raises CheckpointError unless the next checkpoint fits on the disk beside those that are kept."""
        existing = next(p for p in (self.folder, *self.folder.absolute().parents) if p.exists())
        free, needed = shutil.disk_usage(existing).free, int(tensor_bytes * _SLACK)
        if free < needed:
            kept = self.published()
            last = f"the last good one is {kept[-1]}" if kept else "none has been written yet"
            raise CheckpointError(
                f"the next checkpoint takes {format_bytes(needed)}, but {existing} has {format_bytes(free)} "
                f"free; free {format_bytes(needed - free)} more, or choose another `out`; {last}"
            )
