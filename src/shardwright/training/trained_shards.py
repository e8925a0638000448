"""Writes which shards a run needs, so that `data prepare --keep-gib` deletes the shards before its last checkpoint."""

from pathlib import Path

from shardwright.config import RunConfig
from shardwright.config.mixture import mixtures_of, sources_of
from shardwright.data.mixture import MixtureOrder
from shardwright.data.publication import write_first_needed
from shardwright.data.shard_order import ShardOrder
from shardwright.runs.folder import step_of
from shardwright.system.errors import DataError
from shardwright.system.units import GiB, counted, format_bytes, round_up
from shardwright.training.checkpoint.manifest import TrainingProgress
from shardwright.training.checkpoint.store import CheckpointStore
from shardwright.training.hooks import Hook, RunStart, TakenStep
from shardwright.training.sources import RunSamples, Sources

SHARDS = 6
"""Shards besides the tokens between two checkpoints: two that these tokens have a part of and one that is written, each
of up to twice its tokens."""
DISK_BLOCK_BYTES = 4096
"""The unit in which most file systems give space to a file."""


def require_shards(config: RunConfig, sources: Sources, start: RunStart) -> None:
    """Raise DataError if shards that a run needs after `start` are deleted, or `data.keep_gib` has no room for them."""
    order = sources.order(TrainingProgress(start.step, start.samples, config.seed), start.past)
    for number, folder in _places(config).items():
        _require_room(config, sources, number, folder)
    for number, source_order in enumerate(order.orders):
        if not isinstance(source_order, ShardOrder) or not source_order.samples.split.n_deleted:
            continue
        first, split = _first_shard(order, number, start.samples), source_order.samples.split
        if missing := [shard.file for shard in split.manifest.splits["train"].shards[first:] if shard.deleted]:
            begins = f"{start.checkpoint} is too old" if start.checkpoint else "a run from step 0 is too early"
            raise DataError(
                f"{begins}: it needs {missing[0]} of {split.folder}, whose tokens are deleted (data.keep_gib) as far "
                f"as {missing[-1]}; resume from a later checkpoint, or delete {split.folder}, so that it is prepared "
                f"again"
            )


def _require_room(config: RunConfig, sources: Sources, number: int, folder: Path) -> None:
    keep_gib = config.data.keep_gib
    assert keep_gib is not None
    split = sources.train.sources[number].origin(0)[0]
    shard_tokens = int(split.manifest.options["shard_tokens"])
    token_bytes = split.manifest.itemsize + split.masked
    share = max(mixture.weights[number] / sum(mixture.weights) for mixture in mixtures_of(config.data))
    saves = 2 if config.checkpoint.async_mode == "async" else 1
    steps = saves * (config.checkpoint.every or config.steps) + config.data.prefetch
    step_tokens = max(stage.global_batch * stage.seq_len for stage in config.batch.schedule.stages)
    shard_bytes = round_up(shard_tokens * token_bytes, DISK_BLOCK_BYTES)
    evaluated = split.manifest.splits.get("validation")
    first_bytes = sum(shard.bytes for shard in evaluated.shards[:1]) if evaluated else 0
    needed = int(share * steps * step_tokens * token_bytes) + SHARDS * shard_bytes + first_bytes
    if keep_gib * GiB < needed:
        raise DataError(
            f"data.keep_gib={keep_gib:g} is {format_bytes(keep_gib * GiB)}, and {folder} needs "
            f"{format_bytes(needed)}: {steps} steps of {share * step_tokens:,.0f} tokens up to a checkpoint, and "
            f"{SHARDS} x --shard-tokens={shard_tokens:,}, at {counted(token_bytes, 'byte')} a token; raise it to "
            f"{needed / GiB * 1.005:.3g}, lower checkpoint.every, or prepare smaller shards"
        )


def _places(config: RunConfig) -> dict[int, Path]:
    """Return the folders of the sources with `prepare` by number, if `data.keep_gib` is set."""
    given = sources_of(config.data) if config.data.keep_gib is not None else []
    return {number: Path(source.path) for number, source in enumerate(given) if source.prepare}


def _first_shard(order: MixtureOrder, number: int, sample: int) -> int:
    """Return the first shard of a source that the samples of a run from `sample` on need."""
    of_source = order.orders[number]
    assert isinstance(of_source, ShardOrder)
    return of_source.first_shard(int(order.taken(sample)[number]))


class TrainedShards(Hook):
    """Writes the first shard that the newest checkpoint needs, for each source with `prepare`, if `data.keep_gib` is
    set."""

    def __init__(self, config: RunConfig, samples: RunSamples, store: CheckpointStore, rank: int) -> None:
        self.samples, self._store, self._writes = samples, store, rank == 0
        self.places = _places(config)
        """The folders of the sources with `prepare`, by number."""
        self._saved: dict[int, int] = {}
        """The running sample that follows each checkpoint, from the newest one on disk, by step."""
        self._written: dict[int, int] = {}

    def on_start(self, start: RunStart) -> None:
        self._saved = {start.step: start.samples}
        self.tell()

    def on_save(self, taken: TakenStep) -> None:
        if taken.due.save:
            self._saved[taken.step] = taken.samples[1]
        self.end_step(taken)

    def end_step(self, taken: TakenStep) -> None:
        if self._writes and len(self._saved) > 1:
            on_disk = {step_of(path) for path in self._store.published()} & self._saved.keys()
            self._saved = {step: n for step, n in self._saved.items() if step >= max(on_disk, default=0)}
            self.tell()

    def tell(self) -> None:
        """Write the first shard that each source needs after the newest checkpoint, if it has changed."""
        if not self._writes or not self._saved:
            return
        for number, folder in self.places.items():
            first = _first_shard(self.samples.order, number, min(self._saved.values()))
            if self._written.get(number) != first:
                write_first_needed(folder, first)
                self._written[number] = first
