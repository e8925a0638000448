"""A source of text, and a real `prepare --publish` of it that kills itself with SIGKILL."""

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np

OPTIONS: dict[str, Any] = {"vocab_size": 300, "validation": 0.1, "shard_tokens": 3_000, "publish": True}
_PREPARE = """
import os, signal, sys
from shardwright.data import corpus_writer
from shardwright.data.prepare import prepare

corpus_writer.LARGEST_BATCH_BYTES = 2048

def progress(now):
    if now.tokens > int(sys.argv[4]):
        os.kill(os.getpid(), signal.SIGKILL)

prepare(sys.argv[1], sys.argv[2], **eval(sys.argv[3]), progress=progress)
"""


def corpus(path: Path, n: int = 300) -> Path:
    """Write n documents of random letters as JSON lines."""
    letters = np.random.default_rng(0).integers(0, 8, (n, 160))
    texts = ["".join(chr(97 + letter) for letter in row[: 40 + i % 120]) for i, row in enumerate(letters)]
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return path


def prepare_killed(source: Path, out: Path, n_tokens: int = 7_000) -> None:
    """Prepare until `n_tokens` are written, then die by SIGKILL."""
    arguments = [str(source), str(out), repr(OPTIONS), str(n_tokens)]
    died = subprocess.run([sys.executable, "-c", _PREPARE, *arguments], check=False)
    assert died.returncode == -signal.SIGKILL
