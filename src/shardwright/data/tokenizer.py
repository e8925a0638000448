"""Tokenizers: trained here (byte-level BPE), or any `tokenizer.json` of the `tokenizers` library."""

import hashlib
import json
import os
import re
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from shardwright.system.console import stderr_dropped_on_error
from shardwright.system.errors import DataError, nearest
from shardwright.system.files import LONGEST_TOKENIZER, read_bytes
from shardwright.system.units import MiB

SEPARATORS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<|im_end|>")
SMALLEST_BPE = 256 + 1
LARGEST_BPE = 2**22
LONGEST_WORD = 256
"""Characters without white space that are trained on as one word; the library's time is quadratic in their number. No
token of a tokenizer trained here is longer."""
# U+001C to U+001F are white space for Python alone; for the library they are part of a word.
_LONG_WORD = re.compile(rf"[\S\x1c-\x1f]{{{LONGEST_WORD}}}|\s{{{LONGEST_WORD}}}")


@dataclass(frozen=True)
class TextTokenizer:
    """A tokenizer that is ready for a corpus: text to ids and nothing else.

    `vocab_size` is the largest id + 1 (a vocabulary may have gaps); `json_bytes` is its file, byte for byte.
    """

    tokenizer: Tokenizer
    separator: str
    separator_id: int
    vocab_size: int
    json_bytes: bytes

    @property
    def sha256(self) -> str:
        """Checksum of the file, in hex."""
        return hashlib.sha256(self.json_bytes).hexdigest()

    @property
    def fingerprint(self) -> str:
        """A sha256 of everything that determines the ids: equal for files that differ only in format, padding,
        truncation, decoder or the tokens that are added around a text."""
        table = json.loads(Tokenizer.from_buffer(self.json_bytes).to_str())
        relevant = {key: table.get(key) for key in ("normalizer", "pre_tokenizer", "model", "added_tokens")}
        return hashlib.sha256(json.dumps(relevant, sort_keys=True).encode()).hexdigest()

    def encode_batch(self, texts: list[str]) -> list[np.ndarray]:
        """Return the ids of each text, uint32, on all cores; a `<|endoftext|>` in a text is text, not a separator."""
        return [np.array(encoding.ids, np.uint32) for encoding in self.encodings(texts)]

    def encodings(self, texts: list[str], offsets: bool = False) -> list[Any]:
        """Return the library's encoding of each text; with `offsets` also the characters of each token.

        Raises DataError for a tokenizer whose rules fail on a text."""
        encode = self.tokenizer.encode_batch if offsets else self.tokenizer.encode_batch_fast
        with failing_rules():
            encodings: list[Any] = encode(texts, add_special_tokens=False)
        return encodings

    @property
    def special_tokens(self) -> tuple[str, ...]:
        """The texts of its special tokens, in the order of ids."""
        added = sorted(self.tokenizer.get_added_tokens_decoder().items())
        return tuple(token.content for _, token in added if token.special)

    def reads_special_tokens(self) -> None:
        """Read a special token in a text as that token from now on, for text that a chat template has rendered."""
        self.tokenizer.encode_special_tokens = False

    def decode(self, ids: list[int]) -> str:
        """Return the text of `ids`, with separators."""
        return self.tokenizer.decode(ids, skip_special_tokens=False)


def train_bpe(texts: Iterable[str], vocab_size: int, *, sample_bytes: int = 256 * MiB) -> TextTokenizer:
    """Train a byte-level BPE (Sennrich et al. 2016, on bytes as in GPT-2) on the first `sample_bytes` of `texts`.

    Its alphabet is the 256 bytes, so any text is decoded exactly; `<|endoftext|>`, id 0, is the separator. Words are
    cut after LONGEST_WORD characters. A small corpus may give fewer tokens than `vocab_size`. Raises DataError for
    vocab_size below 257 or above `LARGEST_BPE`.
    """
    if vocab_size < SMALLEST_BPE:
        raise DataError(f"vocab_size={vocab_size} is below {SMALLEST_BPE} = 256 bytes + 1 separator")
    if vocab_size > LARGEST_BPE:
        raise DataError(f"vocab_size={vocab_size} is above {LARGEST_BPE:,}, more than any model has")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[SEPARATORS[0]],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    with all_cores():
        tokenizer.train_from_iterator(_first_bytes(texts, sample_bytes), trainer)
    return _ready(tokenizer, SEPARATORS[0], tokenizer.to_str(pretty=True).encode())


def load_tokenizer(path: str | Path, separator: str | None = None) -> TextTokenizer:
    """Load a `tokenizer.json`, with the token that ends a document: `separator`, or the first of SEPARATORS.

    Raises DataError for a file that is missing or not a tokenizer, and if there is no separator.
    """
    path = Path(path)
    if path.is_dir():
        raise DataError(f"{path}: a folder, not a tokenizer; pass the file, {path / 'tokenizer.json'}")
    try:
        json_bytes = read_bytes(path, LONGEST_TOKENIZER)
    except OSError as error:
        raise DataError(f"{path}: the tokenizer cannot be read: {error.strerror}") from error
    tokenizer = parse_tokenizer(
        json_bytes,
        path,
        "for files of SentencePiece or tiktoken, save the model's fast tokenizer with transformers first",
    )
    special = [str(token.content) for token in tokenizer.get_added_tokens_decoder().values() if token.special]
    if separator is None:
        separator = next((name for name in SEPARATORS if tokenizer.token_to_id(name) is not None), None)
        if separator is None:
            choices = f"its special tokens: {', '.join(special)}" if special else "it has no special tokens"
            raise DataError(
                f"{path}: it has none of {', '.join(SEPARATORS)} to end a document; choose with --separator; {choices}"
            )
    elif tokenizer.token_to_id(separator) is None:
        raise DataError(f"{path}: the separator {separator!r} is not in its vocabulary; {nearest(separator, special)}")
    return _ready(tokenizer, separator, json_bytes)


def parse_tokenizer(json_bytes: bytes, path: Path, way_out: str) -> Tokenizer:
    """Return the tokenizer of a tokenizer.json. Raises DataError for content that the library does not accept."""
    with _failures(f"{path}: not a tokenizer.json of the tokenizers library ({{}}); {way_out}"):
        return Tokenizer.from_buffer(json_bytes)


def failing_rules(way_out: str = "take another --tokenizer") -> AbstractContextManager[None]:
    """Return a context that raises DataError if the rules of a tokenizer fail on a text or on ids."""
    return _failures(f"the rules of the tokenizer fail on a text: {{}}; {way_out}")


@contextmanager
def _failures(message: str) -> Iterator[None]:
    """Raise DataError for an error of the library in a context; `message` has a place for its reason."""
    try:
        with stderr_dropped_on_error():  # a panic writes a trace of its own
            yield
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # the library raises bare Exception; its panics are BaseExceptions
        raise DataError(message.format(error)) from None


@contextmanager
def all_cores() -> Iterator[None]:
    """Let the library use its threads in a context, regardless of the environment or an earlier fork."""
    before = os.environ.get("TOKENIZERS_PARALLELISM")
    os.environ["TOKENIZERS_PARALLELISM"] = "true"
    try:
        yield
    finally:
        if before is None:
            del os.environ["TOKENIZERS_PARALLELISM"]
        else:
            os.environ["TOKENIZERS_PARALLELISM"] = before


def _ready(tokenizer: Tokenizer, separator: str, json_bytes: bytes) -> TextTokenizer:
    # A published tokenizer.json may cut at 512 tokens, or pad: both would change the corpus silently.
    tokenizer.no_truncation()
    tokenizer.no_padding()
    # It adds tokens around a text, which are not wanted here, and may remove white space from the places of tokens.
    tokenizer.post_processor = None
    # A corpus about language models quotes special tokens; unquoted they would end documents.
    tokenizer.encode_special_tokens = True
    separator_id = tokenizer.token_to_id(separator)
    assert separator_id is not None
    vocab_size = max(tokenizer.get_vocab(with_added_tokens=True).values()) + 1
    return TextTokenizer(tokenizer, separator, separator_id, vocab_size, json_bytes)


def _first_bytes(texts: Iterable[str], sample_bytes: int) -> Iterator[str]:
    for text in texts:
        yield from short_words(text)
        sample_bytes -= len(text.encode())
        if sample_bytes <= 0:
            return


def short_words(text: str) -> Iterator[str]:
    """Yield `text` in parts without words of more than LONGEST_WORD characters."""
    begin = 0
    for match in _LONG_WORD.finditer(text):
        yield text[begin : match.end()]
        begin = match.end()
    if begin < len(text):
        yield text[begin:]


def tokenizer_difference(data: Path, model: Path) -> str | None:
    """Return why ids of the tokenizer.json `data` mean other texts in the tokenizer.json `model`, in words; None if
    they mean the same. Added tokens that only one has (a padding token) make no difference, nor does the format of the
    file. Raises DataError for a file that is not a tokenizer."""
    if read_bytes(data, LONGEST_TOKENIZER) == read_bytes(model, LONGEST_TOKENIZER):
        return None
    ours, theirs = (_id_of_tokens(path) for path in (data, model))
    if ours.merges != theirs.merges or len(ours.vocabulary) != len(theirs.vocabulary):
        sizes = f"{len(ours.vocabulary):,} and {len(theirs.vocabulary):,} tokens"
        return f"{sizes} without added ones" if len(ours.vocabulary) != len(theirs.vocabulary) else "other merges"
    for i, token in sorted((ours.vocabulary | ours.added).items()):
        other = (theirs.vocabulary | theirs.added).get(i, token)
        if other != token:
            return f"token {i} is {token!r} there and {other!r} here"
    return None


@dataclass(frozen=True)
class _Tokens:
    """The tokens of a tokenizer by id, and the rules by which they are merged."""

    vocabulary: dict[int, str]
    added: dict[int, str]
    merges: str


def _id_of_tokens(path: Path) -> _Tokens:
    tokenizer = parse_tokenizer(read_bytes(path, LONGEST_TOKENIZER), path, "copy it again")
    model = json.loads(tokenizer.to_str())["model"]
    vocabulary = {i: token for token, i in tokenizer.get_vocab(with_added_tokens=False).items()}
    added = {i: token.content for i, token in tokenizer.get_added_tokens_decoder().items()}
    return _Tokens(vocabulary, added, json.dumps(model.get("merges")))
