"""What is in a folder of tokens, for people: totals, shards, the first documents decoded."""

from pathlib import Path
from typing import Any

import numpy as np

from shardwright.data.shards import Manifest, open_split
from shardwright.data.tokenizer import load_tokenizer
from shardwright.errors import DataError

SHOWN_TOKENS = 200


def inspect(directory: str | Path, split: str = "train", n: int = 3) -> dict[str, Any]:
    """The manifest's totals, the lengths of `split`'s documents, and its first `n` documents decoded.

    A document's text is of its first SHOWN_TOKENS tokens. Raises DataError for a folder or split that is not
    there or is damaged.
    """
    if n < 0:
        raise DataError(f"documents={n} must be 0 or more")
    folder = Path(directory)
    manifest = Manifest.read(folder)
    tokens = open_split(folder, split)
    tokenizer = load_tokenizer(folder / manifest.tokenizer_file, manifest.separator)
    lengths = tokens.document_lengths()
    documents = []
    for i in range(min(n, tokens.n_documents)):
        ids = tokens.document(i)
        documents.append(
            {
                "document": i,
                "tokens": len(ids),
                "ids": ids[:16].tolist(),
                "text": tokenizer.decode(ids[:SHOWN_TOKENS].tolist()),
                "shortened": len(ids) > SHOWN_TOKENS,
            }
        )
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
        "documents": documents,
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
