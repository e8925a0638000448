"""The README.md of an exported model: its description and, if the run's folder has them, facts of its training."""

from collections.abc import Iterator
from pathlib import Path

from shardwright.config import load as load_run_file
from shardwright.config.mixture import sources_of
from shardwright.hugging_face.architecture import Architecture
from shardwright.report.words import learning_rate_in_words
from shardwright.run_folder import CHECKPOINTS, METRICS, RUN_FILE, EvaluationRecord, TrainRecord, read_metrics
from shardwright.system.units import format_count
from shardwright.system.version import PACKAGE_VERSION
from shardwright.training.weights import CheckpointWeights, Weights

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


def _run_folder(checkpoint: Path) -> Path | None:
    """Return the folder of the run that contains a checkpoint, or None."""
    inside = checkpoint.absolute().parent
    return inside.parent if inside.name == CHECKPOINTS else None


def _name(path: Path) -> str:
    return (_run_folder(path) or path.absolute()).name


def _facts(weights: CheckpointWeights) -> Iterator[tuple[str, str]]:
    config, progress = load_run_file(weights.path / RUN_FILE), weights.manifest.progress
    yield "steps", f"{progress.step:,} of {config.steps:,}"
    yield "tokens seen", format_count(progress.samples * config.batch.seq_len)
    yield "batch", f"{config.batch.global_batch:,} sequences of {config.batch.seq_len:,} tokens"
    saved = weights.manifest.data["mixture"]["sources"] if weights.manifest.data is not None else []
    for source, kept in zip(sources_of(config.data), saved, strict=False):
        yield "data", f"`{source.path}`, fingerprint `{kept['fingerprint'][:16]}`"
    if config.init.weights is not None:
        yield "began with", f"`{config.init.weights}`"
    yield (
        "optimizer",
        f"{config.optimizer.name}, learning rate {config.optimizer.lr:g}, {learning_rate_in_words(config)}",
    )
    yield "precision", config.precision.in_words
    yield "seed", str(config.seed)
    folder = _run_folder(weights.path)
    records = [] if folder is None else list(read_metrics(folder / METRICS))
    for what, kind in (("training loss", TrainRecord), ("validation loss", EvaluationRecord)):
        losses = [each.loss for each in records if isinstance(each, kind) and each.step <= progress.step]
        if losses:
            yield what, f"{losses[-1]:.4f}"
