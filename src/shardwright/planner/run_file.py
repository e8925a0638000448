"""A chosen layout as a run file that `train` and `verify` accept once its data are filled in."""

import json
import os
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, cast

from shardwright.cost.formats import TRAINED
from shardwright.cost.job import Job
from shardwright.cost.stack import SHARDWRIGHT, SHARDWRIGHT_COMPILED
from shardwright.hugging_face.files import is_folder_of_transformers, read_folder
from shardwright.layout.layout import Layout
from shardwright.model.number_formats import Fp8, Fp8Recipe, replica_problems
from shardwright.model.presets import PRESETS
from shardwright.planner.choice import Choice
from shardwright.planner.whole_run import PlannedStage, micro_batch_of
from shardwright.system import extensions
from shardwright.system.errors import InputError
from shardwright.system.files import real_path
from shardwright.system.units import GiB

STEPS = 1000
DEFAULT_PRESET = "debug"
"""Default preset of [model] in a run file; all its sizes can be changed."""


def precision_keys(job: Job) -> dict[str, Any]:
    """Return the keys of `[precision]` with which `train` computes in the planned precision."""
    return TRAINED[job.precision] | {"compile": job.compiled}


def lora_keys(job: Job) -> dict[str, Any]:
    """Return the section [lora] of the job, without defaults; empty if all weights are trained."""
    lora = job.model.lora
    if lora is None:
        return {}
    return {field.name: value for field in fields(lora) if (value := getattr(lora, field.name)) != field.default}


def memory_gib(job: Job) -> float:
    """Return the memory of one accelerator in GiB for the run file, so that `dryrun` compares with it."""
    return round(job.cluster.accelerator.memory_bytes / GiB, 2)


def untrained(precision: str) -> list[str]:
    """Return the problem of a precision in which `train` does not compute, for a layout that is to be written."""
    if precision in TRAINED:
        return []
    return [f"--write with --precision {precision}: train computes in {' or '.join(TRAINED)}; choose one of them"]


def fp8_problems(job: Job) -> list[str]:
    """Return why Shardwright's own software cannot compute the job in fp8 in any layout."""
    recipe = TRAINED.get(job.precision, {}).get("fp8")
    if recipe is None or job.stack.name not in (SHARDWRIGHT.name, SHARDWRIGHT_COMPILED.name):
        return []
    fp8 = Fp8(cast(Fp8Recipe, recipe), weight_gradient=False)
    return [*replica_problems(job.model, Layout(), fp8)]


def batch_keys(job: Job, choice: Choice, stages: Sequence[PlannedStage] = ()) -> dict[str, Any]:
    """Return the section [batch] of the job, or of the stages of a run."""
    if not stages:
        return {"seq_len": job.seq_len, "global_batch": job.global_batch, "micro_batch": choice.micro_batch}
    first, *later = [
        {
            "seq_len": stage.seq_len,
            "global_batch": stage.global_batch,
            "micro_batch": micro_batch_of(stage, choice),
        }
        for stage in stages
    ]
    pairs = zip(stages[1:], later, strict=True)
    return first | {"stages": [{"from_tokens": float(stage.from_tokens), **sizes} for stage, sizes in pairs]}


def run_file(
    job: Job,
    name: str,
    choice: Choice,
    command: str,
    budget_tokens: float | None = None,
    batch: dict[str, Any] | None = None,
    steps: int | None = None,
) -> str:
    """Return the text of a run file.

    `name`: the preset of the model, its sizes (`model.by_sizes`), or its folder. `command`: the command that found the
    layout, for the first line. `budget_tokens`: the tokens of the whole run. `batch`: its section, if not of the
    job, and `steps`: the steps of these tokens with its stages. Raises InputError for a job that `train` cannot run.
    """
    if problems := untrained(job.precision) + fp8_problems(job):
        raise InputError(*problems)
    batch = dict(batch or batch_keys(job, choice))
    stages = batch.pop("stages", [])
    if steps is None:
        steps = STEPS if budget_tokens is None else max(1, round(budget_tokens / job.tokens))
    tokens = f"{steps * job.tokens:,}" if not stages else f"about {budget_tokens:,.0f}"
    remarks = {
        "init.weights": "fill in: the weights of the frozen base, such as a folder of Hugging Face transformers",
        "data.path": "fill in: a folder written by `shardwright data prepare`, with this model's tokenizer",
        "steps": f"fill in: {steps:,} steps are {tokens} tokens",
        "out": "fill in: where the run is kept",
    }
    lines = [
        f"# Written by `{command}`.",
        f"# For {job.cluster.size} ranks. What to fill in is marked; learning rate and optimizer options are defaults.",
        "",
        _line("out", f"runs/{'model' if '=' in name else real_path(name).name}", remarks["out"]),
        _line("steps", steps, remarks["steps"]),
        _line(
            "memory_gib", memory_gib(job), f"of one {job.cluster.accelerator.name}, which is what it was planned for"
        ),
    ]
    if loaded := extensions.loaded():
        lines.append(_line("extensions", loaded, ""))
    for section, values in _sections(job, name, choice, batch).items():
        lines += ["", f"[{section}]"]
        lines += [_line(key, value, remarks.get(f"{section}.{key}", "")) for key, value in values.items()]
        for stage in stages if section == "batch" else ():
            lines += ["", "[[batch.stages]]", *(_line(key, value, "") for key, value in stage.items())]
    return "\n".join(lines) + "\n"


def _sections(job: Job, name: str, choice: Choice, batch: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the sections of a run file with their keys; `batch`: the section [batch] without stages."""
    layout = choice.settings()
    layout.pop("micro_batch")
    sections: dict[str, dict[str, Any]] = {
        "model": _model_keys(job, name),
        "data": {"path": "data/tokens"} | ({} if job.document_tokens is None else {"attention": "document"}),
        "batch": batch,
        "layout": layout,
        "precision": precision_keys(job),
    }
    if adapters := lora_keys(job):
        sections |= {"init": {"weights": "weights"}, "lora": adapters}
    optimizer = ({"name": job.optimizer} if job.optimizer != Job.optimizer else {}) | (
        {"state_dtype": "bf16"} if job.narrow_states else {}
    )
    if optimizer:
        sections["optimizer"] = optimizer
    return sections


def _model_keys(job: Job, name: str) -> dict[str, Any]:
    """Return the section [model]: a preset and the sizes that differ from it, or a folder that `train` reads. A model
    given by its sizes, or a folder that `train` refuses, becomes the sizes that differ from the default preset."""
    if name in PRESETS:
        return {"preset": name} | _changes(job, name)
    if os.path.isdir(name) and _is_read(Path(name)):
        return {"from": os.path.abspath(name)}
    return {"preset": DEFAULT_PRESET} | _changes(job, DEFAULT_PRESET)


def _is_read(folder: Path) -> bool:
    """Return whether a folder has a model with weights of a readable type; the weights of DeepSeek-V3 are quantised."""
    try:
        return not is_folder_of_transformers(folder) or bool(read_folder(folder))
    except InputError:
        return False


def _changes(job: Job, name: str) -> dict[str, Any]:
    """Return the sizes in which the model differs from its preset; a table that differs is written whole."""
    changes: dict[str, Any] = {}
    preset = PRESETS[name]
    for field in fields(preset):
        if field.name == "lora":  # a section of its own
            continue
        value = getattr(job.model, field.name)
        if value != getattr(preset, field.name):
            changes[field.name] = value
    if job.seq_len > job.model.max_seq_len:
        changes["max_seq_len"] = job.seq_len
    return changes


def _line(key: str, value: Any, remark: str) -> str:
    written = f"{key} = {_toml(value)}"
    return f"{written}  # {remark}" if remark else written


def _toml(value: Any) -> str:
    if hasattr(value, "__dataclass_fields__"):
        inner = {field.name: getattr(value, field.name) for field in fields(value)}
        return "{ " + ", ".join(f"{key} = {_toml(below)}" for key, below in inner.items()) + " }"
    return json.dumps(list(value) if isinstance(value, tuple) else value)
