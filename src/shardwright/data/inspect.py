"""What is in a folder of tokens, for people: totals, shards, the first documents decoded."""

from pathlib import Path
from typing import Any

import numpy as np

from shardwright.data.samples import PackedSamples
from shardwright.data.shards import Manifest, TokenSplit, open_split
from shardwright.data.tokenizer import TextTokenizer, load_tokenizer
from shardwright.errors import DataError

SHOWN_TOKENS = 200


def inspect(directory: str | Path, split: str = "train", n: int = 3, seq_len: int | None = None) -> dict[str, Any]:
    """The manifest's totals, the lengths of `split`'s documents, and its first `n` documents decoded; with `seq_len`
    instead the first `n` packed samples of so many tokens.

    A document's text is of its first SHOWN_TOKENS tokens. Of conversations, `segments` are its pieces of text with
    whether their tokens are trained on. Raises DataError for a folder or split that is not
    there or is damaged.
    """
    if n < 0:
        raise DataError(f"documents={n} must be 0 or more")
    folder = Path(directory)
    manifest = Manifest.read(folder)
    tokens = open_split(folder, split)
    tokenizer = load_tokenizer(folder / manifest.tokenizer_file, manifest.separator)
    lengths = tokens.document_lengths()
    if seq_len is None:
        n_there, most = tokens.n_documents, SHOWN_TOKENS
        spans = [(tokens.document_start(i), tokens.document_start(i + 1)) for i in range(min(n, n_there))]
    else:
        samples = PackedSamples(tokens, seq_len)
        n_there, most = len(samples), seq_len + 1
        spans = [(start, start + length) for start, length in map(samples.span, range(min(n, n_there)))]
    return {
        "folder": str(folder),
        "created_by": manifest.created_by,
        "fingerprint": manifest.fingerprint,
        "dtype": manifest.dtype,
        "tokenizer": {
            "file": manifest.tokenizer_file,
            "vocab_size": manifest.vocab_size,
            "separator": manifest.separator,
            "separator_id": manifest.separator_id,
        },
        "source": manifest.source,
        "options": manifest.options,
        "splits": {name: part.model_dump(mode="json") for name, part in manifest.splits.items()},
        "split": split,
        "document_tokens": _quantiles(lengths),
        "shown": "document" if seq_len is None else f"sample of {seq_len} tokens",
        "documents": [_shown(tokens, tokenizer, i, span, most) for i, span in enumerate(spans)],
    }


def _shown(tokens: TokenSplit, tokenizer: TextTokenizer, i: int, span: tuple[int, int], most: int) -> dict[str, Any]:
    """Document or sample i of a split, tokens span[0] to span[1] of it, decoded up to `most` tokens."""
    start, end = span
    ids, trained = tokens.tokens(start, end - start), tokens.trained(start, end - start)
    shown = ids[:most]
    changes = np.flatnonzero(np.diff(trained[:most])) + 1
    parts = zip(np.split(shown, changes), np.split(trained[:most], changes), strict=True)
    masked = {
        "trained_tokens": int(trained.sum()),
        "segments": [{"text": tokenizer.decode(part.tolist()), "trained": bool(of[0])} for part, of in parts],
    }
    return {
        "document": i,
        "tokens": len(ids),
        "ids": ids[:16].tolist(),
        "text": tokenizer.decode(shown.tolist()),
        "shortened": len(ids) > most,
        **(masked if tokens.masked else {}),
    }


def _quantiles(lengths: np.ndarray) -> dict[str, float]:
    if not len(lengths):
        return {}
    low, median, high = np.quantile(lengths, (0.1, 0.5, 0.9))
    return {
        "mean": float(lengths.mean()),
        "shortest": int(lengths.min()),
        "p10": float(low),
        "median": float(median),
        "p90": float(high),
        "longest": int(lengths.max()),
    }
