"""`shardwright export`: weights as a folder that `transformers.AutoModelForCausalLM.from_pretrained` loads.

The folder has a README.md with a description of the model and, if the run's folder has them, facts of its training.
"""

import json
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer
from torch import Tensor

from shardwright.config import load_kept
from shardwright.config.mixture import sources_of
from shardwright.data.chat import TEMPLATE
from shardwright.data.shards import tokenizer_folder
from shardwright.data.token_manifest import TOKENIZER, DataManifest
from shardwright.data.tokenizer import tokenizer_difference
from shardwright.hugging_face.architecture import Architecture, architecture_of
from shardwright.hugging_face.files import CONFIG, token_ids, write_token_ids
from shardwright.hugging_face.table import FileTensor, file_tensors
from shardwright.hugging_face.writer import write_weights
from shardwright.model.modules import rows
from shardwright.model.spec import ModelSpec
from shardwright.report.words import learning_rate_in_words
from shardwright.runs.folder import METRICS, RUN_FILE, run_of_checkpoint
from shardwright.runs.records import EvaluationRecord, TrainRecord, read_metrics
from shardwright.system.errors import CheckpointError, DataError, InputError
from shardwright.system.files import LONGEST_TOKENIZER, inside, new_folder, read_bytes
from shardwright.system.units import format_count
from shardwright.system.version import PACKAGE_VERSION
from shardwright.training.adapters import BaseWithAdapters
from shardwright.training.importing import copy_tokenizer, is_free
from shardwright.training.sources import ends_of_text, readable_sources, tokenizer_file
from shardwright.training.weights import (
    AdaptedWeights,
    AveragedWeights,
    CheckpointWeights,
    Weights,
    count_not_finite,
    not_finite_in_words,
    open_weights,
)

DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16", "fp64": "float64"}
"""Type on the command line -> torch's name of it."""
MAX_SHARD_BYTES = 5 * 10**9
TOKENIZER_CONFIG = "tokenizer_config.json"


@dataclass(frozen=True)
class ExportResult:
    """The written architecture, the type and bytes of the weights, and remarks for the user."""

    architecture: Architecture
    dtype: str
    n_bytes: int
    remarks: tuple[str, ...]


def export(
    source: str | Path | Weights,
    out: str | Path,
    *,
    dtype: str | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    tokenizer: str | Path | None = None,
    allow_nan: bool = False,
    architecture: str | None = None,
    average: bool = False,
    merge: bool = False,
) -> ExportResult:
    """Write weights to the new folder `out` in the format of `transformers`, with one tensor in memory at a time.

    `source`: a run (its newest checkpoint), a checkpoint, a folder of `shardwright import` or of `transformers`, or
    weights that are open.
    `dtype`: bf16, fp16, fp32 or fp64; default: the stored types. `tokenizer`: a folder with the tokenizer to write;
    default: the tokenizer of the weights or of the run's data. `allow_nan`: also write NaN and infinite values, which
    otherwise raise InputError. `architecture`: the model_type to write, if several fit; default: the first. `average`:
    write the average of the weights instead of the weights (`[average]`). `merge`: of a run with adapters, write the
    base with the adapters merged into it. Raises ConfigError with the reason for a
    model without an architecture in `transformers`, and CheckpointError for missing or damaged weights and for
    weights without an average.
    """
    problems = [] if dtype is None or dtype in DTYPES else [f"--dtype {dtype}: valid: {', '.join(DTYPES)}"]
    if max_shard_bytes < 1:
        problems.append(f"--max-shard-size of {max_shard_bytes} bytes: 1 or more is needed")
    try:
        weights = _weights_to_write(source, average, merge)
        written = architecture_of(weights.spec, architecture)
    except InputError as error:
        raise (InputError(*problems, *error.problems) if problems else error) from None
    if problems:
        raise InputError(*problems)
    tensors = file_tensors(written, weights.spec)
    types = _types(tensors, weights, dtype)
    main = Counter(types.values()).most_common(1)[0][0]
    with new_folder(Path(out), is_free, CheckpointError) as fresh:
        remarks, ids = write_tokenizer(weights.path, fresh, tokenizer, weights.spec.max_seq_len)
        if not (fresh / TOKENIZER).is_file():
            remarks = [f"{remark}; give one with --tokenizer FOLDER" for remark in remarks]
        config = written.config(weights.spec) | {"torch_dtype": main, "dtype": main, **ids}
        (fresh / CONFIG).write_text(json.dumps(config, indent=2) + "\n")
        write_token_ids(fresh, ids)
        not_finite: list[str] = []

        def count(name: str, tensor: Tensor) -> None:
            if n := count_not_finite(tensor):
                not_finite.append(f"{not_finite_in_words(weights.path, n, tensor.numel(), name)} in {types[name]}")

        n_bytes = write_weights(fresh, tensors, types, weights.read, max_shard_bytes, count)
        if not_finite and not allow_nan:
            way_out = "take an earlier checkpoint, or a --dtype of larger range; --allow-nan writes them as they are"
            raise InputError(*(f"{problem}; {way_out}" for problem in not_finite))
        remarks += not_finite
        (fresh / "README.md").write_text(model_card(weights, written, main), encoding="utf-8")
    return ExportResult(written, main, n_bytes, (*remarks, *_differences(written, weights.spec)))


def _differences(written: Architecture, spec: ModelSpec) -> Iterator[str]:
    """Yield remarks on how the model in transformers differs from the trained model."""
    if spec.moe is not None and spec.moe.capacity_factor:
        yield "in transformers no token is dropped; here tokens beyond moe.capacity_factor are"
    if spec.mtp_modules and not written.module:
        what = "modules of multi-token prediction are left out"
        yield f"{what}: the files of {written.class_name} have no place for them"


def _weights_to_write(source: str | Path | Weights, average: bool, merge: bool) -> Weights:
    """Return the weights of `source`, their average, or the base with its adapters merged into it. Raises
    CheckpointError if they do not exist."""
    weights = open_weights(source) if isinstance(source, str | Path) else source
    if average and weights.spec.lora is not None:
        raise CheckpointError(f"{weights.path} has adapters, whose average cannot be written; leave --average out")
    weights = AveragedWeights(weights) if average else weights
    if isinstance(weights, AdaptedWeights):
        if not merge:
            raise CheckpointError(
                f"{weights.path} has adapters; give --adapter to write them alone, or --merge to write the base "
                f"with them merged into it"
            )
        return BaseWithAdapters(weights)
    if merge:
        raise CheckpointError(f"{weights.path} has no adapters to merge; leave --merge out")
    return weights


def _types(tensors: list[FileTensor], weights: Weights, dtype: str | None) -> dict[str, str]:
    """Return the type of each tensor in the files. A selection bias keeps its type, as in transformers."""
    model_rows = rows(weights.spec)
    types = {}
    for tensor in tensors:
        name = tensor.parts[0].name
        keeps = dtype is None or model_rows[name].kind == "balance"
        types[tensor.name] = weights.dtypes[name] if keeps else DTYPES[dtype or ""]
    return types


def _added_tokens(tokenizer_json: bytes) -> list[str]:
    """Return a remark on tokens that a tokenizer adds to a text but that the run's data does not contain."""
    if not (added := Tokenizer.from_buffer(tokenizer_json).encode("").tokens):
        return []
    return [
        f"in transformers the tokenizer adds {' '.join(added)} to a text, and the run's data had none; for the tokens "
        f"of `shardwright generate` on the run encode with add_special_tokens=False"
    ]


def write_tokenizer(
    source: Path, out: Path, given: str | Path | None, max_seq_len: int
) -> tuple[list[str], dict[str, int | list[int]]]:
    """Write the tokenizer of the weights in the folder `source`, or of the folder `given`. Return remarks, and the ids
    of the tokens that start and end a text. `max_seq_len`: of the model, in tokens."""
    if given is not None and (Path(given) / TOKENIZER).is_file():
        theirs, difference = tokenizer_file(source), None
        with suppress(DataError):  # a damaged tokenizer is a reason to give --tokenizer
            difference = theirs and tokenizer_difference(inside(Path(given), TOKENIZER, DataError), theirs)
        if difference:
            raise DataError(
                f"--tokenizer {given} is not the tokenizer of {source} ({difference}), so the token "
                f"ids of the model mean other texts; leave --tokenizer out to write {theirs}"
            )
    for folder in [Path(given)] if given is not None else [source]:
        if TOKENIZER in copy_tokenizer(folder, out):
            return [], token_ids(folder)
        if given is not None:
            raise DataError(f"--tokenizer {folder}: there is no {TOKENIZER}")
    if not (source / RUN_FILE).is_file():
        return [f"no tokenizer: {source} has none"], token_ids(source)
    section = load_kept(source).data
    try:
        data = tokenizer_folder(section)
        manifest = DataManifest.read(data)
        text = read_bytes(inside(data, TOKENIZER, DataError), LONGEST_TOKENIZER)
    except (InputError, OSError) as error:
        reason = str(error).splitlines()[0]
        return [f"no tokenizer: the tokenizer of the run's data cannot be read ({reason})"], {}
    (out / TOKENIZER).write_bytes(text)
    chats = {folder: chat for folder, chat in readable_sources(section).items() if chat.chat_template_sha256}
    named: dict[str, str] = {}
    for folder, of_chat in list(chats.items())[:1]:
        (out / TEMPLATE).write_bytes(read_bytes(inside(folder, TEMPLATE, DataError)))
        named = of_chat.chat_tokens
    settings: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": manifest.separator,
        "eos_token": manifest.separator,
        "model_max_length": max_seq_len,
        "clean_up_tokenization_spaces": False,
    } | {name: token or None for name, token in named.items()}
    (out / TOKENIZER_CONFIG).write_text(json.dumps(settings, indent=2, ensure_ascii=False) + "\n")
    ends = ends_of_text(section)
    return _added_tokens(text), {
        "bos_token_id": manifest.separator_id,
        "eos_token_id": ends if len(ends) > 1 else ends[0],
    }


_HEAD = """\
---
library_name: transformers
pipeline_tag: text-generation
tags:
- shardwright
---

# {name}

A `{architecture}` of {parameters} parameters ({dtype}), written by `shardwright export` {version}.

```python
from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained("PATH")
tokenizer = AutoTokenizer.from_pretrained("PATH")
```
"""


def model_card(weights: Weights, architecture: Architecture, dtype: str) -> str:
    """Return the text of the card. It includes facts of the run if Shardwright trained the weights."""
    text = _HEAD.format(
        name=_name(weights.path),
        architecture=architecture.class_name,
        parameters=format_count(weights.spec.n_parameters),
        dtype=dtype,
        version=PACKAGE_VERSION,
    )
    if isinstance(weights, CheckpointWeights) and (weights.path / RUN_FILE).is_file():
        rows = [f"| {what} | {value} |" for what, value in _facts(weights)]
        text += "\n## Training\n\n" + "\n".join(["| | |", "| --- | --- |", *rows]) + "\n"
    return text


def _name(path: Path) -> str:
    return (run_of_checkpoint(path) or path.absolute()).name


def _facts(weights: CheckpointWeights) -> Iterator[tuple[str, str]]:
    config, progress = load_kept(weights.path), weights.manifest.progress
    if isinstance(weights, AveragedWeights):
        yield "weights", f"average of the weights over the steps, kind {config.average.kind}"
    yield "steps", f"{progress.step:,} of {config.steps:,}"
    schedule = config.batch.schedule
    yield "tokens seen", format_count(progress.samples * schedule.longest.seq_len)
    yield "batch", ", then ".join(map(str, schedule.stages))
    saved = weights.manifest.data["mixture"]["sources"] if weights.manifest.data is not None else []
    for source, kept in zip(sources_of(config.data), saved, strict=False):
        yield "data", f"`{source.path}`, fingerprint `{kept['fingerprint'][:16]}`"
    if config.init.weights is not None:
        yield "started with", f"`{config.init.weights}`"
    yield (
        "optimizer",
        f"{config.optimizer.name}, learning rate {config.optimizer.lr:g}, {learning_rate_in_words(config)}",
    )
    yield "precision", config.precision.in_words
    yield "seed", str(config.seed)
    folder = run_of_checkpoint(weights.path)
    records = [] if folder is None else list(read_metrics(inside(folder, METRICS)))
    done = [record for record in records if record.step <= progress.step]
    evaluated = [record for record in done if isinstance(record, EvaluationRecord)]
    losses = {
        "training loss": [record.loss for record in done if isinstance(record, TrainRecord)],
        "validation loss": [record.loss for record in evaluated],
    }
    if isinstance(weights, AveragedWeights):  # the other losses are of the weights that are not exported
        losses = {"validation loss": [record.average_loss for record in evaluated if record.average_loss is not None]}
    for what, values in losses.items():
        if values:
            yield what, f"{values[-1]:.4f} {config.preference.loss_unit}"
