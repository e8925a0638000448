"""Describes a folder of tokens: totals, shards, the first documents decoded."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from shardwright.config.sections import DataSection
from shardwright.data.samples import Samples, samples_of
from shardwright.data.shards import TokenSplit, open_split
from shardwright.data.tokenizer import TextTokenizer, load_tokenizer
from shardwright.split.documents import Lengths, attended_tokens, imbalance, plan
from shardwright.system.errors import DataError

SHOWN_TOKENS = 200
SHOWN_SEQUENCES = 64
RINGS = (2, 4, 8)


def inspect(directory: str | Path, split: str = "train", n: int = 3, seq_len: int | None = None) -> dict[str, Any]:
    """Return the manifest's totals, the lengths of `split`'s documents, and its first `n` documents decoded; with
    `seq_len` instead the first `n` samples of that many tokens, packed or of whole pairs of answers, and the effect of
    attention within documents in such samples (`packing`).

    A document's text is decoded from its first SHOWN_TOKENS tokens. For conversations, `segments` are the pieces of
    text with whether their tokens are trained on. Raises DataError for a folder or split that is missing or damaged.
    """
    if n < 0:
        raise DataError(f"documents={n} must be 0 or more")
    tokens = open_split(directory, split)
    folder, manifest = tokens.folder, tokens.manifest
    tokenizer = load_tokenizer(folder / manifest.tokenizer_file, manifest.separator)
    lengths = tokens.document_lengths()
    if seq_len is None:
        n_there, most = tokens.n_documents, SHOWN_TOKENS
        spans = [(tokens.document_start(i), tokens.document_start(i + 1)) for i in range(min(n, n_there))]
    else:
        samples = _samples(tokens, seq_len)
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
        "packing": None if seq_len is None else packing(tokens, seq_len),
        "shown": "document" if seq_len is None else f"sample of {seq_len} tokens",
        "documents": [_shown(tokens, tokenizer, i, span, most) for i, span in enumerate(spans)],
    }


def _shown(tokens: TokenSplit, tokenizer: TextTokenizer, i: int, span: tuple[int, int], most: int) -> dict[str, Any]:
    """Return document or sample i of a split, its tokens span[0] to span[1], decoded up to `most` tokens."""
    start, end = span
    ids, trained = tokens.tokens(start, end - start), tokens.trained(start, end - start)
    shown = ids[:most]
    changes = np.flatnonzero(np.diff(trained[:most])) + 1
    parts = zip(np.split(shown, changes), np.split(trained[:most], changes), strict=True)
    masked = {
        "trained_tokens": int(trained.sum()),
        "segments": [{"text": tokenizer.decode(part.tolist()), "trained": bool(flags[0])} for part, flags in parts],
    }
    return {
        "document": i,
        "tokens": len(ids),
        "ids": ids[:16].tolist(),
        "text": tokenizer.decode(shown.tolist()),
        "shortened": len(ids) > most,
        **(masked if tokens.masked else {}),
    }


def packing(tokens: TokenSplit, seq_len: int) -> dict[str, Any]:
    """Return the statistics of attention within documents in the sequences of `_samples`: the mean length of a
    token's document, the scores as a fraction of the scores over whole sequences, and for each ring the imbalance of
    its ranks.

    The imbalance is the scores of the rank with the most over the mean, with zig-zag chunks over the sequence and with
    documents assigned one by one (`split.documents`): `sum` over all steps of the ring, `steps` if ranks wait for each
    other after each step, `worst` the sum of the worst sequence; `sent`: keys that are sent, as a fraction of the keys
    that a ring over whole sequences sends. Computed for SHOWN_SEQUENCES sequences, spread evenly, and for the RINGS
    whose zig-zag chunks divide `seq_len`. Raises DataError if the split has fewer tokens.
    """
    samples = _samples(tokens, seq_len)
    n = min(len(samples), SHOWN_SEQUENCES)
    sequences = [tuple(samples.documents(i * len(samples) // n)) for i in range(n)]
    mean = attended_tokens(samples.document_lengths())
    return {
        "seq_len": seq_len,
        "sequences": len(samples),
        "documents_a_sequence": sum(map(len, sequences)) / n,
        "attended_tokens": mean,
        "scores_share": (mean + 1) / (seq_len + 1),
        "shown": n,
        "rings": [{"cp": ring} | _balance(sequences, ring) for ring in RINGS if seq_len % (2 * ring) == 0],
    }


def _samples(tokens: TokenSplit, seq_len: int) -> Samples:
    """Return the samples of a run with attention within documents: packed sequences, or whole pairs of answers."""
    return samples_of(tokens, DataSection(attention="document", positions="document"), seq_len)


def _balance(sequences: Sequence[Lengths], ring: int) -> dict[str, Any]:
    by_method = {}
    for name, deals in (("zigzag", False), ("dealt", True)):
        total, steps = imbalance(sequences, "zigzag", ring, deals)
        worst = max(imbalance([lengths], "zigzag", ring, deals)[0] for lengths in sequences)
        sent = sum(
            sum(plan((lengths,), "zigzag", ring, rank, deals).receives) for lengths in sequences for rank in range(ring)
        )
        whole = sum(sum(lengths) for lengths in sequences) * (ring - 1)
        by_method[name] = {"sum": total, "steps": steps, "worst": worst, "sent": sent / whole if whole else 0.0}
    return by_method


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
