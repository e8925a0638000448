"""Encodes text of any length into the token ids of encoding it at once, in windows that fit into memory.

Neighbouring windows overlap by 2 x CONTEXT characters. Their tokens are joined in the middle of the overlap, at a run
of tokens on which both agree and that covers at least AGREED characters. Without such a run the two windows are encoded
as one.
"""

import itertools
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np

from shardwright.system.units import KiB

WINDOW = 256 * KiB
"""Characters of a window: few enough to spread one long file over many cores."""
CONTEXT = 4 * KiB
AGREED = KiB
# Characters that may precede a text without changing its tokens.
_NEUTRAL = ("\n", ".", "a", "0")
Spans = tuple[tuple[int, int], ...]


class Encoder(Protocol):
    """A tokenizer, as `TextTokenizer`."""

    def encodings(self, texts: list[str], offsets: bool = False) -> list[Any]:
        """Return the library's encoding of each text; with `offsets` also the characters of each token."""


class TextSection(NamedTuple):
    """Text that is encoded as one: a document, or its prompt or completion.

    `spans`: the characters that are trained on; None for all. `skip`: characters at its start that are not part of the
    document (`continued`). `closed`: whether it ends with a token that ends an answer.
    """

    document: int
    pieces: Iterable[str]
    spans: Spans | None = None
    skip: int = 0
    closed: bool = False


class TextWindow(NamedTuple):
    """A part of a section from character `start` on; `last`: whether the section ends with it."""

    section: TextSection
    text: str
    start: int
    last: bool

    @property
    def needs_offsets(self) -> bool:
        """Return whether the character positions of its tokens are needed."""
        return bool(self.section.spans is not None or self.section.skip or self.start or not self.last)


def windows(section: TextSection) -> Iterator[TextWindow]:
    """Yield the windows of a section in order; none if it has no text."""
    text, start = "", 0
    for piece in section.pieces:
        text += piece
        while len(text) > WINDOW + 2 * CONTEXT:
            yield TextWindow(section, text[:WINDOW], start, False)
            text, start = text[WINDOW - 2 * CONTEXT :], start + WINDOW - 2 * CONTEXT
    if text:
        yield TextWindow(section, text, start, True)


def continued(document: int, text: str, spans: Spans, tokenizer: Encoder, closed: bool) -> TextSection:
    """Return a section that continues the previous one. Many tokenizers write a space before a text; a neutral
    character before the text takes that space, and its tokens are left out."""
    head = text[:256]
    for neutral in _NEUTRAL:
        [encoding] = tokenizer.encodings([neutral + head], offsets=True)
        if all(end <= 1 or start >= 1 for start, end in encoding.offsets):
            moved = tuple((begin + 1, end + 1) for begin, end in spans)
            return TextSection(document, [neutral + text], moved, 1, closed)
    return TextSection(document, [text], spans, 0, closed)


def answer_sections(
    document: int, texts: Sequence[str], trained: Sequence[bool], apart: bool, tokenizer: Encoder, closed: bool
) -> Iterator[TextSection]:
    """Yield the sections of a document in pieces; `trained`: the pieces that are trained on. `apart`: the pieces are a
    prompt and a completion, each encoded alone."""
    if apart:
        prompt, completion = texts
        spans: Spans = ((0, len(completion)),) if trained[1] else ()
        yield TextSection(document, [prompt], ())
        yield continued(document, completion, spans, tokenizer, closed)
        return
    places = [0, *itertools.accumulate(map(len, texts))]
    spans = tuple(place for place, counts in zip(itertools.pairwise(places), trained, strict=True) if counts)
    yield TextSection(document, ["".join(texts)], spans, closed=closed)


def encode(tokenizer: Encoder, parts: list[TextWindow]) -> list[Any]:
    """Return the encoding of each window, computed on all cores."""
    encodings: list[Any] = [None] * len(parts)
    for offsets in (False, True):
        chosen = [i for i, part in enumerate(parts) if part.needs_offsets == offsets]
        if chosen:
            of_chosen = tokenizer.encodings([parts[i].text for i in chosen], offsets=offsets)
            for i, encoding in zip(chosen, of_chosen, strict=True):
                encodings[i] = encoding
    return encodings


def encode_sections(tokenizer: Encoder, sections: Iterable[TextSection]) -> tuple[np.ndarray, np.ndarray]:
    """Return the token ids of one document, uint32, and which of them are trained on, bool."""
    joiner, ids, trained = Joiner(tokenizer), [np.zeros(0, np.uint32)], [np.zeros(0, bool)]
    for section in sections:
        for window in windows(section):
            for ids_N, trained_N in joiner.add(window, encode(tokenizer, [window])[0]):
                ids.append(ids_N)
                trained.append(np.broadcast_to(trained_N, ids_N.shape))
    return np.concatenate(ids), np.concatenate(trained)


class Joiner:
    """Joins the tokens of windows, which are added in order."""

    def __init__(self, tokenizer: Encoder) -> None:
        self._tokenizer = tokenizer
        self._current: tuple[TextWindow, Any, int] | None = None
        """A window, and the index of its first token that has not been yielded."""

    def add(self, window: TextWindow, encoding: Any) -> Iterator[tuple[np.ndarray, np.ndarray | bool]]:
        """Yield the token ids that are settled by now, with a mask of the ids that are trained on."""
        if self._current is None:
            self._current = window, encoding, _first_token(encoding, window.section.skip) if window.section.skip else 0
        else:
            before, ids_before, first = self._current
            if (places := _meeting(before, ids_before, window, encoding)) is None:
                text = before.text + window.text[before.start + len(before.text) - window.start :]
                whole = TextWindow(window.section, text, before.start, window.last)
                self._current = whole, self._tokenizer.encodings([text], offsets=True)[0], first
            else:
                yield _settled(before, ids_before, first, places[0])
                self._current = window, encoding, places[1]
        if window.last:
            before, ids_before, first = self._current
            self._current = None
            yield _settled(before, ids_before, first, len(ids_before))


def _settled(window: TextWindow, encoding: Any, first: int, last: int) -> tuple[np.ndarray, np.ndarray | bool]:
    ids = np.array(encoding.ids[first:last], np.uint32)
    if window.section.spans is None:
        return ids, True
    trained = np.zeros(len(encoding), bool)
    for begin, end in window.section.spans:
        begin, end = begin - window.start, end - window.start
        if end > 0 and begin < len(window.text):
            trained[_first_token(encoding, begin + 1, ends=True) : _first_token(encoding, end)] = True
    return ids, trained[first:last]


def _first_token(encoding: Any, place: int, ends: bool = False) -> int:
    """Return the first token that starts, or ends, at or after a character."""
    return bisect_left(range(len(encoding)), place, key=lambda i: encoding.token_to_chars(i)[ends])


def _meeting(before: TextWindow, ids_before: Any, after: TextWindow, ids_after: Any) -> tuple[int, int] | None:
    """Return the tokens of two overlapping windows at which the second may continue the first."""
    middle = after.start + CONTEXT
    low, high = middle - CONTEXT // 2, middle + CONTEXT // 2
    rows = [
        [
            (*(place + window.start for place in encoding.token_to_chars(i)), ids[i], i)
            for ids in (encoding.ids,)
            for i in range(_first_token(encoding, low - window.start), _first_token(encoding, high - window.start))
        ]
        for window, encoding in ((before, ids_before), (after, ids_after))
    ]
    one, other, run, best = 0, 0, 0, (0, 0, 0, 0)
    while one < len(rows[0]) and other < len(rows[1]):
        ours, theirs = rows[0][one], rows[1][other]
        if ours[:3] == theirs[:3]:
            run += 1
            best = max(best, (ours[1] - rows[0][one - run + 1][0], run, ours[3], theirs[3]))
            one, other = one + 1, other + 1
        else:
            run = 0
            one, other = (one + 1, other) if ours[:2] <= theirs[:2] else (one, other + 1)
    n_characters, n_tokens, ours_last, theirs_last = best
    half = n_tokens // 2
    return (ours_last - half, theirs_last - half) if n_characters >= AGREED else None
