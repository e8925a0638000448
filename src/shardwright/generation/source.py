"""Opens a model for generation: its sizes, its weights, its tokenizer, and the token that ends a text."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from torch import nn

from shardwright.config import load_kept
from shardwright.data.chat import TEMPLATE, ChatFormat, read_chat_format
from shardwright.data.shards import tokenizer_folder
from shardwright.data.token_manifest import TOKENIZER, DataManifest
from shardwright.data.tokenizer import failing_rules, parse_tokenizer
from shardwright.hugging_face.files import token_ids
from shardwright.layout.layout import Layout
from shardwright.model.spec import ModelSpec
from shardwright.model.transformer import Transformer
from shardwright.parallel.apply import apply
from shardwright.parallel.boxes import local_box
from shardwright.parallel.model import ParallelModel
from shardwright.runs.folder import RUN_FILE
from shardwright.system.errors import DataError
from shardwright.system.files import LONGEST_TOKENIZER, inside, read_bytes
from shardwright.training.checkpoint.manifest import read_manifest
from shardwright.training.sources import ends_of_text, is_of, readable_sources
from shardwright.training.weights import Weights, fill, open_weights

_OTHER_TOKENIZER = "give the model the tokenizer.json that it was trained with"


@dataclass(frozen=True)
class Text:
    """A tokenizer, and the ids of the tokens that end a text. `begins`: whether a text starts with the tokens that the
    tokenizer adds, as in transformers; data prepared by Shardwright have none."""

    tokenizer: Tokenizer
    ends: frozenset[int]
    begins: bool = False
    begin: int | None = None
    """The id of the token that starts a text; None if there is none."""

    def encode(self, text: str, begins: bool | None = None) -> list[int]:
        """Return the ids of a text; `begins` as in the class if None. Raises DataError as `failing_rules` does."""
        added = self.begins if begins is None else begins
        with failing_rules(_OTHER_TOKENIZER):
            ids: list[int] = self.tokenizer.encode(text, add_special_tokens=added).ids
        return ids

    def encodings(self, texts: list[str], offsets: bool = False) -> list[Any]:
        """Return the library's encoding of each text, without added tokens; a `data.encoding.Encoder`."""
        encode = self.tokenizer.encode_batch if offsets else self.tokenizer.encode_batch_fast
        with failing_rules(_OTHER_TOKENIZER):
            encodings: list[Any] = encode(texts, add_special_tokens=False)
        return encodings

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of ids, special tokens included. Raises DataError as `failing_rules` does."""
        with failing_rules(_OTHER_TOKENIZER):
            return self.tokenizer.decode(list(ids), skip_special_tokens=False)


@dataclass(frozen=True)
class Source:
    """The model of a run, a checkpoint or a folder of transformers. `spec` is the model without settings of training:
    no expert has a capacity, and no router draws."""

    weights: Weights
    spec: ModelSpec
    dtype: torch.dtype

    def fill(self, parameters: Iterable[tuple[str, nn.Parameter]]) -> None:
        """Fill parameters, whole or this rank's shards of them, by their global names.

        Raises DamagedError for a checkpoint that is damaged.
        """
        fill(parameters, self.spec, self.weights, local_box)

    def whole(self, device: torch.device) -> Transformer:
        """Return the whole model on this process, in evaluation mode."""
        with torch.device("meta"):
            model = Transformer(self.spec).to(self.dtype)
        model = model.to_empty(device=device).eval()
        self.fill(model.named_parameters())
        return model

    def on_rank(
        self, layout: Layout, device: torch.device, seq_len: int | None = None, *, batch_invariant: bool = False
    ) -> ParallelModel:
        """Return this rank's part of a layout, with its weights; every rank of the world calls it."""
        model = apply(
            self.spec, layout, device, seed=0, param_dtype=self.dtype, compute_dtype=self.dtype, seq_len=seq_len,
            batch_invariant=batch_invariant,
        )  # fmt: skip
        self.fill(model.named_parameters.items())
        model.after_change()
        return model

    def text(self) -> Text:
        """Return the tokenizer next to the weights; for a run, its data's. Raises DataError if it is missing or has
        changed."""
        path = self.weights.path
        return _text_of_data(path) if (path / RUN_FILE).is_file() else _text_of_folder(path)

    def chat(self) -> ChatFormat:
        """Return the chat format of prompts: the chat template of the tokenizer, or of a run's data. Raises DataError
        if there is none, or it cannot be read."""
        path = self.weights.path
        special_tokens = tuple(
            token.content for token in self.text().tokenizer.get_added_tokens_decoder().values() if token.special
        )
        if not (path / RUN_FILE).is_file():
            return read_chat_format(path / TOKENIZER, None, special_tokens)
        for folder, data in readable_sources(load_kept(path).data).items():
            if data.chat_template_sha256:
                chat_format = read_chat_format(None, inside(folder, TEMPLATE, DataError), special_tokens)
                return replace(chat_format, tokens=tuple(data.chat_tokens.items()))
        return ChatFormat()


def open_source(folder: Path) -> Source:
    """Return the model in a folder: a run (its newest checkpoint), a checkpoint, or a folder of transformers.

    Raises InputError for a folder that is none of these or is damaged.
    """
    weights = open_weights(folder)
    spec = weights.spec
    if spec.moe is not None:
        spec = replace(spec, moe=replace(spec.moe, capacity_factor=0.0, force_balance=False))
    return Source(weights, spec, getattr(torch, weights.dtypes["embedding.weight"]))


def _text_of_data(checkpoint: Path) -> Text:
    section = load_kept(checkpoint).data
    try:
        folder = tokenizer_folder(section)
        data = DataManifest.read(folder, check_files=False)
        trained_on = read_manifest(checkpoint).data
        if trained_on is not None and not is_of(trained_on["mixture"]["sources"][0], data):
            raise DataError(f"{folder} holds other data now than the run was trained on")
    except DataError as error:
        way_out = "a run uses the tokenizer of its data: prepare that folder again as it was"
        raise DataError(*(f"{problem}; {way_out}" for problem in error.problems)) from None
    tokenizer = _tokenizer(folder, "prepare the data again")
    return Text(tokenizer, frozenset(ends_of_text(section)), begin=data.separator_id)


def _text_of_folder(folder: Path) -> Text:
    tokenizer = _tokenizer(folder, "save it there with transformers' tokenizer.save_pretrained")
    ids = token_ids(folder)
    ends, begin = ids.get("eos_token_id", []), ids.get("bos_token_id")
    return Text(
        tokenizer,
        frozenset(ends if isinstance(ends, list) else [ends]),
        begins=True,
        begin=begin if isinstance(begin, int) else None,
    )


def _tokenizer(folder: Path, way_out: str) -> Tokenizer:
    path = inside(folder, TOKENIZER, DataError)
    if not path.is_file():
        raise DataError(f"{folder} has no {TOKENIZER}, by which a prompt becomes tokens; {way_out}")
    try:
        content = read_bytes(path, LONGEST_TOKENIZER)
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror}; {way_out}") from None
    tokenizer = parse_tokenizer(content, path, way_out)
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer
