"""A folder of tokens that `prepare --publish` adds shards to: begun, continued or found complete."""

import hashlib
import json
import re
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardwright.data.chat import TEMPLATE, ChatFormat
from shardwright.data.token_manifest import MANIFEST, TOKENIZER, DataManifest
from shardwright.data.tokenizer import TextTokenizer
from shardwright.system.errors import DataError, without_secrets
from shardwright.system.owner import LOCK, sole_owner

_OURS = re.compile(
    rf"(train|validation)-\d+\.(bin|idx|trained|sums)|\..*\.tmp|{TOKENIZER}|{TEMPLATE}|{re.escape(LOCK)}"
)


@dataclass(frozen=True)
class Publication:
    """`name`: identifies the folder to readers. `manifest`: of the shards that are complete; None before the first."""

    folder: Path
    name: str
    manifest: DataManifest | None

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
    """Own the folder `out`, and yield its publication; files that its manifest does not list are deleted, as a prepare
    that was killed leaves them. `given`: the settings of the manifest's `source` and `options`.

    Raises DataError for a folder with other contents, with other settings, or owned by another prepare.
    """
    if out.is_symlink() or (out.exists() and not out.is_dir()):
        raise DataError(f"{out}: that is a link or a file; name another --out")
    names = {entry.name for entry in out.iterdir()} if out.exists() else set()
    # A tokenizer alone is the user's own: a prepare that was killed has also left its lock.
    ours = {name for name in names if _OURS.fullmatch(name) and (LOCK in names or name not in (TOKENIZER, TEMPLATE))}
    if MANIFEST not in names and (others := sorted(names - ours)):
        raise DataError(f"{out}: it has files that prepare did not make: {', '.join(others[:5])}; name another --out")
    with sole_owner(out, "--out"):
        manifest = DataManifest.read(out) if (out / MANIFEST).exists() else None
        if manifest is not None:
            _require_settings(out, manifest, given)
        if manifest is None or manifest.unfinished is not None:
            listed = set() if manifest is None else {MANIFEST, *manifest.sha256_of_files}
            for path in out.iterdir():
                if path.name not in listed | {LOCK} and _OURS.fullmatch(path.name):
                    path.unlink()
        name = manifest.publication if manifest is not None else None
        yield Publication(out, name or uuid.uuid4().hex, manifest)


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
