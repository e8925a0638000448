"""A folder of tokens that `prepare --publish` adds shards to: begun, continued or found complete.

New files are written to `OUT/.shardwright-unpublished` and moved to OUT, the manifest last, so OUT only has files that
its manifest or the manifest in that folder lists. No other file is replaced or deleted.
"""

import hashlib
import json
import os
import re
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardwright.data.blocks import file_sha256
from shardwright.data.chat import TEMPLATE, ChatFormat
from shardwright.data.token_manifest import MANIFEST, TOKENIZER, DataManifest
from shardwright.data.tokenizer import TextTokenizer
from shardwright.system.errors import DataError, without_secrets
from shardwright.system.files import LOCK, sole_owner, sync

STAGING = ".shardwright-unpublished"
_SHARD = re.compile(r"(train|validation)-\d+\.(bin|idx|trained|sums)")


@dataclass(frozen=True)
class Publication:
    """`name`: identifies the folder to readers. `manifest`: of the shards that are complete; None before the first."""

    folder: Path
    name: str
    manifest: DataManifest | None

    @property
    def staging(self) -> Path:
        """The folder for files that are not published."""
        return self.folder / STAGING

    def publish(self, manifest: DataManifest) -> DataManifest:
        """Move the files of a manifest from the staging folder to `folder`, then the manifest, and return it as it can
        be read back. Raises DataError if a file of another origin has one of the names."""
        written = manifest.written(self.staging)
        _move_staged(self.folder)
        return written

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
                (f"separator than {tokenizer.separator!r}", tokenizer.separator, self.manifest.separator),
            ]
        for name, here, there in compared:
            if here != there:
                raise DataError(
                    f"{self.folder}: its shards were written with another {name}; give the one in that folder to "
                    f"continue, or choose another --out"
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
    listed = {LOCK, STAGING} | (set() if manifest is None else {MANIFEST, *manifest.sha256_of_files})
    unlisted = sorted({entry.name for entry in out.iterdir()} - listed)
    if others := [name for name in unlisted if manifest is None or _SHARD.fullmatch(name)]:
        raise DataError(f"{out}: it has files that prepare did not make: {', '.join(others[:5])}; name another --out")


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
    here = json.loads(without_secrets(json.dumps(given)))
    recorded = {"source": manifest.source, "options": manifest.options}
    pairs = [(key, recorded[part].get(key), value) for part, values in here.items() for key, value in values.items()]
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
