"""The sections of the run file as frozen, documented models: each key with its type, default and description."""

import dataclasses
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    Strict,
    ValidationError,
    create_model,
)
from pydantic_core import PydanticCustomError

from shardwright.hugging_face.files import is_folder_of_transformers, read_folder
from shardwright.layout.key import LayoutKey
from shardwright.layout.keys import KEYS as LAYOUT_KEYS
from shardwright.layout.layout import Layout
from shardwright.model.lora_sizes import BaseType, LoraSpec
from shardwright.model.presets import resolve
from shardwright.model.saved import TABLES, differences, spec_as_json
from shardwright.model.sections import Described, RopeScaling, descriptions
from shardwright.model.spec import ModelSpec
from shardwright.runs.folder import MODEL_FILE, RUN_FILE
from shardwright.system import extensions
from shardwright.system.errors import ConfigError
from shardwright.system.files import inside, parse_toml, read_text, real_path
from shardwright.system.remote import REMOTE
from shardwright.system.units import GiB


class BrokenRules(PydanticCustomError):
    """The broken rules of a section, as whole sentences; raised from its validator."""

    def __new__(cls, *problems: str) -> "BrokenRules":
        return super().__new__(cls, "refused", "{problems}", {"problems": problems})


class RunFileSection(BaseModel):
    """A table of the run file. Unknown keys are rejected, values are not coerced, and instances are frozen."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


RENAMED = {
    "schedule": "lr_schedule",
    "layout.schedule": "layout.pp_schedule",
    "optimizer.adamw_lr_scale": "[optimizer.lr_scale] embedding, head, norm, bias, router",
}
"""Old names of keys and sections, with their new names."""


PATH: dict[str, Any] = {"path": True}
"""Marks the fields whose values are paths; relative paths are relative to the folder of the run file."""


def located(path: str, folder: Path) -> str:
    """Return a path of a run file in `folder` as the process can open it: `~` is expanded, URLs are unchanged."""
    return path if not path or REMOTE in path else os.path.normpath(folder / os.path.expanduser(path))


Positive = Annotated[int, Field(ge=1)]
Counted = Annotated[int, Field(ge=1, le=2**31)]
"""A number with which work and memory grow."""
NotNegative = Annotated[int, Field(ge=0)]
Fraction = Annotated[float, Field(ge=0, le=1)]


MODEL_TABLES: dict[str, type[Described]] = {"rope_scaling": RopeScaling, **TABLES}


def _overrides(name: str, spec: type[Described]) -> Any:
    """Return a section in which every field of `spec` is optional."""

    def override(field: dataclasses.Field[Any]) -> Any:
        table = MODEL_TABLES.get(field.name)
        kind: Any = field.type if table is None else _overrides(f"{table.__name__}Section", table)
        if kind == tuple[int, ...]:
            kind = list[NotNegative]  # TOML has lists and no tuples
        elif field.default == ():
            kind = Annotated[kind, Strict(False)]
        return (kind | None, Field(None, description=field.metadata["help"]))

    changes = {field.name: override(field) for field in dataclasses.fields(spec) if field.name != "lora"}
    return create_model(name, __base__=RunFileSection, __doc__=spec.__doc__, **changes | _SOURCES.get(spec, {}))


_FROM: Any = Field(
    None,
    json_schema_extra=PATH,
    description="instead of a preset: a folder of Hugging Face transformers, one that `shardwright import` wrote, a "
    "checkpoint or a run, whose sizes these are; other keys here may not contradict it",
)
# `from` is a Python keyword, so the field must be created by name.
_SOURCES: dict[type[Described], dict[str, Any]] = {ModelSpec: {"from": (str | None, _FROM)}}
_ModelOverrides: Any = _overrides("_ModelOverrides", ModelSpec)


class ModelSection(_ModelOverrides):
    """The model: a preset or the model of a folder, and any size of it changed."""

    preset: str = Field("debug", description="a named model to start from; every other key here changes it")

    @property
    def folder(self) -> str | None:
        """The value of `from`."""
        folder: str | None = getattr(self, "from")
        return folder

    def spec(self) -> ModelSpec:
        """Return the preset or the folder's model, with the changes of this section.

        Raises ConfigError for an unknown preset, for an incomplete table that the base model does not have, and for
        changes that contradict the weights of the folder.
        """
        if self.folder is None:
            return self._changed(resolve(self.preset), f"model.preset={self.preset!r}")
        if "preset" in self.model_fields_set:
            raise ConfigError(
                f"model.preset={self.preset!r} and model.from={self.folder!r} both name a model; give one"
            )
        saved = dataclasses.replace(spec_of_folder(Path(self.folder)), lora=None)
        wanted = self._changed(saved, f"model.from={self.folder!r}")
        if problems := contradictions(saved, wanted, f"model.from={self.folder!r}"):
            raise ConfigError(*problems)
        return wanted

    def _changed(self, base: ModelSpec, origin: str) -> ModelSpec:
        """Return a model with the changes of this section; `origin` names the model in errors."""
        given = self.model_fields_set - {"preset", "from"}
        changes = {k: v for k in given if (v := getattr(self, k)) is not None}
        problems: list[str] = []
        for name in changes.keys() & MODEL_TABLES.keys():
            inner = changes[name].model_dump(exclude_none=True)
            table = getattr(base, name)
            if table is not None and inner.get("kind", getattr(table, "kind", None)) == getattr(table, "kind", None):
                changes[name] = dataclasses.replace(table, **inner)
                continue
            required = [f for f in dataclasses.fields(MODEL_TABLES[name]) if f.default is dataclasses.MISSING]
            missing = [field for field in required if field.name not in inner]
            problems += [
                f"model.{name}.{field.name}: missing, and {origin} has no {name} to take it from; "
                f"it is {field.metadata['help'][0].lower()}{field.metadata['help'][1:].rstrip('.')}"
                for field in missing
            ]
            if not missing:
                changes[name] = MODEL_TABLES[name](**inner)
        if problems:
            raise ConfigError(*problems)
        return dataclasses.replace(base, **changes)

    def resolved(self) -> dict[str, Any]:
        """Return this section as saved with a run: with every size if they come from a folder, which may be deleted."""
        if self.folder is None:
            return self.model_dump(exclude_none=True)
        return {"preset": self.preset} | table_of(self.spec())


def table_of(spec: ModelSpec) -> dict[str, Any]:
    """Return a model as the section [model] of a run file, with every size."""
    return {name: value for name, value in spec_as_json(spec).items() if value is not None}


def contradictions(saved: ModelSpec, wanted: ModelSpec, origin: str) -> list[str]:
    """Return the reasons why weights of the model `saved` do not fit `wanted`, one sentence each.

    `origin` names `saved`.

    Longer sequences, another base or scaling of the rotary frequencies, and settings that only training uses may
    differ.
    """
    free = ("rope_theta", "rope_scaling", *(() if saved.positions == "learned" else ("max_seq_len",)))
    return [
        f"model.{key}={given!r} contradicts {origin}, which has {stored!r}; leave it out, or set model.from"
        for key, stored, given in differences(saved, wanted, free)
    ]


def spec_of_folder(path: Path) -> ModelSpec:
    """Return the model of a folder from transformers or `shardwright import`, of a checkpoint or of a run.

    Raises ConfigError for any other folder, and for an unsupported model with all reasons.
    """
    for name in (MODEL_FILE, RUN_FILE):
        if (path / name).is_file():
            try:
                table = parse_toml(read_text(inside(path, name, ConfigError)))
                model = table.get("model", {})
                if isinstance(source := model.get("from"), str):
                    model["from"] = located(source, path)
                    if real_path(model["from"]) == real_path(path):
                        continue  # a run file next to the config.json of the model that it trains
                if problems := extensions.load_named(table, path, started=False):
                    raise ConfigError(*problems)
                lora = LoraSection.model_validate(table.get("lora", {})).spec
                return dataclasses.replace(ModelSection.model_validate(model).spec(), lora=lora)
            except (ValueError, ValidationError) as error:
                if isinstance(error, ConfigError):
                    raise
                raise ConfigError(f"{path / name} is damaged, or of another version: {error}") from None
            except RecursionError:
                raise ConfigError(
                    f"{path / name}: model.from leads back to this file; name a folder with a model"
                ) from None
    if is_folder_of_transformers(path):
        return read_folder(path).spec
    what = "holds no model" if path.is_dir() else "is no folder"
    raise ConfigError(
        f"{path} {what}; give a folder of transformers (config.json), one that `shardwright import` wrote "
        f"({MODEL_FILE}), a checkpoint or a run ({RUN_FILE})"
    )


class SourceSection(RunFileSection):
    """One source of a mixture."""

    path: str = Field(
        min_length=1, json_schema_extra=PATH, description="a folder written by `shardwright data prepare`"
    )
    name: str | None = Field(None, min_length=1, description="what stages and records call it; else its folder's name")
    prepare: list[str] = Field(
        [],
        description="source and options of `shardwright data prepare`, such as ['hf:NAME', '--tokenizer', 'FILE']; "
        "the run starts this command, which publishes the shards of path; needs data.order = shards",
    )
    weight: float | None = Field(
        None, description="its share of the samples, relative to the other weights; none: a stage brings it in"
    )


class StageSection(RunFileSection):
    """Other weights from a step on."""

    from_step: int = Field(description="steps that are done when this stage starts")
    weights: dict[str, float] = Field(description="name of a source = its weight; a source not named takes no part")


Scope = Literal["sequence", "document"]


class TokenCache(NamedTuple):
    """The folder in which tokens at a URL are mirrored (None: the default folder), and the most bytes of its disk."""

    folder: str | None = None
    n_bytes: int = 20 * GiB


class DataSection(RunFileSection):
    """The place of the tokens, and how sequences are made of them."""

    path: str | None = Field(
        None,
        min_length=1,
        json_schema_extra=PATH,
        description="a folder written by `shardwright data prepare`, here or at a URL of fsspec (s3://BUCKET/FOLDER, "
        "gs://, ...); or give sources",
    )
    prepare: list[str] = Field([], description="as prepare of [[data.sources]], for the folder at path")
    sources: list[SourceSection] = Field([], description="[[data.sources]]: several folders, mixed by weight")
    stages: list[StageSection] = Field([], description="[[data.stages]]: other weights of the sources, from a step on")
    sequences: Literal["packed", "documents"] = Field(
        "packed",
        description="packed: documents one after another, split every seq_len tokens; "
        "documents: each document starts a sequence, the rest of it is padding that does not count",
    )
    order: Literal["all", "shards"] = Field(
        "all",
        description="all: each epoch permutes all samples of a source; shards: shard after shard, the samples of each "
        "permuted, so that a run can start before `data prepare --publish` has finished",
    )
    wait_s: Annotated[float, Field(ge=0)] = Field(
        600.0,
        description="order = shards: seconds that a step waits for the next shard of an unfinished `data prepare`; "
        "then the run saves and ends",
    )
    keep_gib: Annotated[float, Field(gt=0, le=2**40)] | None = Field(
        None,
        description="GiB of the disk that the tokens of a source with prepare may occupy; the oldest shards from "
        "before the last checkpoint are deleted, and prepare waits while there is none; none: all are kept",
    )
    other_tokenizer: bool = Field(
        False,
        description="take data whose tokenizer is not the tokenizer of init.weights or model.from, as a run from "
        "random weights can; without it such data is refused, as its token ids mean other texts",
    )
    mask_boundaries: bool = Field(False, description="packed only: leave the first token of a document out of the loss")
    attention: Scope = Field(
        "sequence",
        description="the tokens before it that a token attends to: all of the sequence, or with document the tokens of "
        "its own document",
    )
    positions: Scope = Field(
        "sequence", description="where positions restart: with each sequence, or with document also with each document"
    )
    prefetch: Annotated[int, Field(ge=1, le=4096)] = Field(2, description="steps of data that are read ahead")
    cache: str | None = Field(
        None,
        min_length=1,
        json_schema_extra=PATH,
        description="folder on a local disk for tokens that are read from a URL; none: ~/.cache/shardwright/tokens, "
        "or in XDG_CACHE_HOME",
    )
    cache_gib: Annotated[float, Field(gt=0, le=2**40)] = Field(
        20.0,
        description="GiB of the disk that the tokens of a data folder at a URL may occupy; the parts fetched first are "
        "deleted first",
    )

    @property
    def token_cache(self) -> TokenCache:
        """Return the place and size of the mirrors of tokens at URLs."""
        return TokenCache(self.cache, int(self.cache_gib * GiB))


def _layout_key(key: LayoutKey) -> Any:
    """Return a field of [layout], optional if the layout derives its default from other keys."""

    def valid(value: Any) -> Any:
        if rule := key.problem(value, key.in_run_file):
            raise PydanticCustomError("layout", "{rule}", {"rule": rule})
        return value

    kind = list[Positive] if key.name == "stage_layers" else key.type
    if key.members:
        kind = Annotated[kind, Strict(False)]  # TOML has lists and no tuples
    kind = Annotated[kind, AfterValidator(valid)]
    return (kind if key.default is not None else kind | None, Field(key.default, description=key.help))


_LayoutKeys: Any = create_model(
    "_LayoutKeys", __base__=RunFileSection, **{name: _layout_key(key) for name, key in LAYOUT_KEYS.items()}
)


class LayoutSection(_LayoutKeys):
    """The partition of model and batch over the dp_replicate x dp_shard x cp x tp x pp ranks; ep is within them."""

    @property
    def recomputation(self) -> tuple[str, int | None]:
        """Return `recompute`, which may be "auto", and `recompute_layers`."""
        values = self.model_dump()
        return values["recompute"], values["recompute_layers"]

    def layout(self) -> Layout:
        """Return the layout with these degrees. An unsettled recompute='auto' counts as its default. Raises
        LayoutError."""
        values = self.model_dump()
        for name, key in LAYOUT_KEYS.items():
            if values[name] in key.in_run_file:
                values[name] = key.default
        values |= {name: tuple(value) for name, value in values.items() if isinstance(value, list)}
        return Layout(**values)


class ScheduleSection(RunFileSection):
    """The learning rate over the steps, as a fraction of optimizer.lr."""

    by: Literal["steps", "tokens"] = Field(
        "steps",
        description="unit of the warm-up and the fall; tokens differ from steps with batch.stages",
    )
    shape: Literal["cosine", "wsd", "constant"] = Field(
        "cosine", description="after warm-up: half a cosine; warm-up, stable, linear decay; or flat"
    )
    warmup_steps: NotNegative = Field(0, description="steps of linear rise from zero")
    decay_steps: NotNegative = Field(0, description="wsd only: steps of linear fall at the end")
    final_fraction: Fraction = Field(0.1, description="final learning rate, as a fraction of the peak")


class InitSection(RunFileSection):
    """Initial weights of a new run, which are random unless some are given. Step, data and learning rate are new."""

    weights: str | None = Field(
        None,
        json_schema_extra=PATH,
        description="weights to start with: a folder of Hugging Face transformers, one that `shardwright import` "
        "wrote, a checkpoint, or a run, whose newest checkpoint is taken",
    )
    optimizer: bool = Field(
        False, description="also take the moments of the optimizer and their step counts, which a checkpoint has"
    )

    def problems(self) -> Iterator[str]:
        """Yield one sentence for each broken rule between the keys."""
        if self.optimizer and self.weights is None:
            yield "init.optimizer=true goes with init.weights, the checkpoint whose moments it takes; give that too"


class LoraSection(RunFileSection):
    """Low-rank adapters: the base weights are frozen, and only adapters of some matrices are trained."""

    rank: NotNegative = Field(0, description=descriptions(LoraSpec)["rank"])
    alpha: Annotated[float, Field(gt=0)] = Field(16.0, description=descriptions(LoraSpec)["alpha"])
    targets: list[str] = Field(["attention", "ffn"], description=descriptions(LoraSpec)["targets"])
    rslora: bool = Field(False, description=descriptions(LoraSpec)["rslora"])
    dropout: Annotated[float, Field(ge=0, lt=1)] = Field(0.0, description=descriptions(LoraSpec)["dropout"])
    dora: bool = Field(False, description=descriptions(LoraSpec)["dora"])
    base: BaseType = Field("compute", description=descriptions(LoraSpec)["base"])

    @property
    def spec(self) -> LoraSpec | None:
        """The adapters, or None if all weights are trained."""
        return LoraSpec(**self.model_dump()) if self.rank else None


class PreferenceSection(RunFileSection):
    """Training on pairs of a chosen and a rejected answer, instead of the next token."""

    kind: Literal["none", "dpo", "ipo", "simpo"] = Field(
        "none",
        description="the loss of a pair: DPO or IPO, relative to the reference, which is the model before the first "
        "step, or SimPO without a reference; none: the next token is trained",
    )
    beta: Annotated[float, Field(gt=0)] = Field(
        0.1, description="dpo, simpo: factor of the difference of log-probabilities; ipo: 1 / (2 beta) is its target"
    )
    gamma: Annotated[float, Field(ge=0)] = Field(
        0.5, description="simpo only: beta times the difference of log-probabilities a token should exceed this"
    )

    @property
    def has_reference(self) -> bool:
        """Return whether the loss compares with the log-probabilities of a reference model."""
        return self.kind in ("dpo", "ipo")

    @property
    def loss_unit(self) -> str:
        """The unit of the loss of a run: of its records, its validation loss and its curves."""
        return {"none": "nats a token", "ipo": "squared distance to its target, a pair"}.get(self.kind, "nats a pair")


NO_PREFERENCE = PreferenceSection()


class EvaluationSection(RunFileSection):
    """Validation loss."""

    every: NotNegative = Field(0, description="steps between evaluations; 0: only before and after training")
    samples: NotNegative = Field(
        64, description="sequences evaluated, the same ones each time, of each source of data; 0: no evaluation"
    )
