"""A folder of tokens that `prepare --publish` adds shards to: started, continued or found complete.

New files are written to `OUT/.shardwright-unpublished` and moved to OUT, the manifest last, so OUT only has files that
its manifest or the manifest in that folder lists. No other file is replaced or deleted.

With `--keep-gib` the tokens of shards that a run has trained on are deleted when others need the room. The run writes
the number of the first shard that it needs to `OUT/.shardwright-trained`.
"""

import hashlib
import json
import os
import re
import shutil
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from shardwright.data.blocks import file_sha256
from shardwright.data.chat import TEMPLATE, ChatFormat
from shardwright.data.mirror import make_hole, occupied_bytes
from shardwright.data.token_manifest import MANIFEST, TOKENIZER, DataManifest, Shard
from shardwright.data.tokenizer import TextTokenizer
from shardwright.system.errors import DataError, without_secrets
from shardwright.system.files import read_bytes, sync, write_whole
from shardwright.system.owner import LOCK, sole_owner
from shardwright.system.units import MiB, round_up

STAGING = ".shardwright-unpublished"
TRAINED = ".shardwright-trained"
POLL_S = 0.2
"""Pause between two looks at the shards that a run has trained on."""
_SHARD = re.compile(r"(train|validation)-\d+\.(bin|idx|trained|sums)")


def write_first_needed(folder: Path, shard: int) -> None:
    """Write the number of the first shard of `train` that a run on `folder` needs, also if it is resumed."""
    write_whole(folder / TRAINED, f"{shard}\n".encode())


def read_first_needed(folder: Path) -> int:
    """Return the number that `write_first_needed` wrote, or 0."""
    try:
        return int(read_bytes(folder / TRAINED))
    except (OSError, ValueError):
        return 0


class Publication:
    """A folder whose manifest lists the shards that are complete."""

    def __init__(self, folder: Path, name: str, manifest: DataManifest | None) -> None:
        """`name`: identifies the folder to readers. `manifest`: None before the first shard."""
        self.folder, self.name, self.manifest = folder, name, manifest

    @property
    def staging(self) -> Path:
        """The folder for files that are not published."""
        return self.folder / STAGING

    def publish(self, manifest: DataManifest) -> DataManifest:
        """Move the files of a manifest from the staging folder to `folder`, then the manifest, and return it as it can
        be read back. Raises DataError if a file of another origin has one of the names."""
        self.manifest = _with_deleted(manifest, self._deleted).written(self.staging)
        _move_staged(self.folder)
        return self.manifest

    @property
    def _deleted(self) -> set[str]:
        splits = self.manifest.splits.values() if self.manifest else ()
        return {shard.file for split in splits for shard in split.shards if shard.deleted}

    def make_room(self, n_bytes: int, most_bytes: int, waiting: Callable[[], None]) -> None:
        """Return when the files of tokens and masks occupy at most `most_bytes` - `n_bytes`. Delete shards that no run
        needs for that, the oldest first, and call `waiting` before each pause without any."""
        parent = os.getppid()
        for name in self._deleted:  # again, because a prepare that was killed may have only recorded them
            self._delete(name)
        while (surplus := occupied_bytes(self.folder) + n_bytes - most_bytes) > 0:
            shards = [shard for shard in self._unneeded() if not shard.deleted]
            if not shards or self.manifest is None:
                if os.getppid() != parent:
                    raise DataError(
                        f"{self.folder}: the process that started this prepare has ended while it waited for room; "
                        f"give the same command again"
                    )
                waiting()
                time.sleep(POLL_S)
                continue
            taken = [shard for i, shard in enumerate(shards) if sum(s.bytes for s in shards[:i]) < surplus]
            names = {shard.file for shard in taken}
            self.manifest = _with_deleted(self.manifest, self._deleted | names).written(self.folder)
            for name in names:
                self._delete(name)

    def _unneeded(self) -> list[Shard]:
        """Return the shards that a run does not read again: of `validation` all but the first, then of `train`."""
        if self.manifest is None:
            return []
        splits = {name: split.shards for name, split in self.manifest.splits.items()}
        needed = read_first_needed(self.folder)
        return [*splits.get("validation", ())[1:], *splits["train"][:needed]]

    def _delete(self, name: str) -> None:
        assert self.manifest is not None
        [shard] = [shard for split in self.manifest.splits.values() for shard in split.shards if shard.file == name]
        for content in shard.content:
            path = self.folder / content
            make_hole(path, 0, round_up(path.stat().st_size, MiB))  # with the last disk block, which is not full

    def require_tokenizer(self, tokenizer: TextTokenizer | None, chat: ChatFormat | None) -> None:
        """Raise DataError if the shards that are complete were written with another tokenizer, separator or template.
        `tokenizer`: None for the tokenizer in the folder."""
        if self.manifest is None:
            return
        template = hashlib.sha256(chat.template.encode()).hexdigest() if chat and chat.template else None
        compared = [(TEMPLATE, template, self.manifest.chat_template_sha256)]
        if tokenizer is not None:
            compared += [
                (TOKENIZER, tokenizer.sha256, self.manifest.tokenizer_sha256),
                ("separator", tokenizer.separator, self.manifest.separator),
            ]
        for name, given, recorded in compared:
            if given != recorded:
                values = f": {recorded!r}, not {given!r}" if name == "separator" else ""
                raise DataError(
                    f"{self.folder}: its shards were written with another {name}{values}; give the {name} of that "
                    f"folder to continue, or choose another --out"
                )


@contextmanager
def publishing(out: Path, given: dict[str, dict[str, Any]]) -> Iterator[Publication]:
    """Own the folder `out`, and yield its publication. A publication that was killed while files were moved is finished
    first; files that were not complete are deleted. `given`: the settings of the manifest's `source` and `options`.

    Raises DataError for a folder with files of another origin, with other settings, or owned by another prepare.
    """
    if out.is_symlink() or (out.exists() and not out.is_dir()):
        raise DataError(f"{out}: that is a link or a file; name another --out")
    if out.exists() and not (out / LOCK).exists() and not (out / MANIFEST).exists():
        _require_own_files(out, None)
    with sole_owner(out, "--out"):
        if (out / STAGING / MANIFEST).exists():
            _move_staged(out)
        manifest = DataManifest.read(out) if (out / MANIFEST).exists() else None
        if manifest is not None:
            _require_settings(out, manifest, given)
        if manifest is None or manifest.unfinished is not None:
            _require_own_files(out, manifest)
        publication = Publication(out, (manifest and manifest.publication) or uuid.uuid4().hex, manifest)
        shutil.rmtree(publication.staging, ignore_errors=True)
        publication.staging.mkdir()
        try:
            yield publication
        finally:
            if not (publication.staging / MANIFEST).exists():
                shutil.rmtree(publication.staging, ignore_errors=True)


def _require_own_files(out: Path, manifest: DataManifest | None) -> None:
    """Raise DataError if the folder has a file that is not listed: any file without a manifest, and with one a file
    with the name of a shard."""
    listed = {LOCK, STAGING, TRAINED} | (set() if manifest is None else {MANIFEST, *manifest.sha256_of_files})
    unlisted = sorted({entry.name for entry in out.iterdir()} - listed)
    if others := [name for name in unlisted if manifest is None or _SHARD.fullmatch(name)]:
        raise DataError(f"{out}: it has files that prepare did not make: {', '.join(others[:5])}; name another --out")


def _with_deleted(manifest: DataManifest, files: set[str]) -> DataManifest:
    """Return a manifest in which the shards with the tokens `files` are deleted."""
    splits = {
        name: split.model_copy(
            update={
                "shards": tuple(shard.model_copy(update={"deleted": shard.file in files}) for shard in split.shards)
            }
        )
        for name, split in manifest.splits.items()
    }
    return manifest.model_copy(update={"splits": splits})


def _move_staged(out: Path) -> None:
    """Move the files of the staged manifest to `out`, or the rest of them, and the manifest last."""
    staging = out / STAGING
    staged = DataManifest.read(staging, check_files=False)
    before = DataManifest.read(out, check_files=False) if os.path.lexists(out / MANIFEST) else None
    problem = "is not of this publication; move it away, then start the same prepare again"
    if before is not None and before.publication != staged.publication:
        raise DataError(f"{out / MANIFEST} {problem}")
    for name, sha256 in staged.sha256_of_files.items():
        fresh, final = staging / name, out / name
        if before is not None and name in before.sha256_of_files:
            continue
        if os.path.lexists(final) and (fresh.exists() or file_sha256(final) != sha256):
            raise DataError(f"{final} {problem}")
        if fresh.exists():
            sync(fresh)
            fresh.rename(final)
    sync(out)
    os.replace(staging / MANIFEST, out / MANIFEST)
    sync(out)


def _require_settings(out: Path, manifest: DataManifest, given: dict[str, dict[str, Any]]) -> None:
    if manifest.publication is None:
        raise DataError(f"{out}: exists already, and was not made with --publish; choose another --out")
    masked = json.loads(without_secrets(json.dumps(given)))
    recorded = {"source": manifest.source, "options": manifest.options}
    pairs = [(key, recorded[part].get(key), value) for part, values in masked.items() for key, value in values.items()]
    differing = [
        f"{f'no {key}' if before is None else f'{key}={before!r}'}, not {'none' if now is None else repr(now)}"
        for key, before, now in pairs
        if before != now
    ]
    if differing:
        raise DataError(
            f"{out}: its shards were written with {'; '.join(differing)}; give the same options to continue, or "
            f"choose another --out"
        )
