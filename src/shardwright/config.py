"""The run file: TOML read into frozen, documented models; strict, and every problem reported at once.

    config = load("examples/quickstart.toml", ["layout.dp_shard=2", "steps=100"])

A key that is not here is an error that names the nearest one that is. `resolved_toml` writes a configuration
back as a run file with every default filled in; it is saved with each run.
"""

import dataclasses
import json
import math
import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    create_model,
    model_validator,
)
from pydantic_core import PydanticCustomError

from shardwright import extensions
from shardwright.errors import ConfigError, LayoutError, nearest
from shardwright.keys import Key as LayoutKey
from shardwright.layout import KEYS as LAYOUT_KEYS
from shardwright.layout import Layout, accumulation
from shardwright.model.presets import resolve
from shardwright.model.sections import Described, LatentAttentionSpec, MoESpec, RopeScaling
from shardwright.model.spec import ModelSpec
from shardwright.optimizers import OPTIMIZERS, OptimizerKind
from shardwright.split.rules import problems as split_problems
from shardwright.split.stages import schedule_problems
from shardwright.synonyms import called_here


class _Refused(PydanticCustomError):
    """What a section's own rules say, as whole sentences; raised from its validator."""

    def __new__(cls, *problems: str) -> "_Refused":
        return super().__new__(cls, "refused", "{problems}", {"problems": problems})


class Section(BaseModel):
    """A table of the run file: unknown keys are refused, values are not coerced, and nothing changes later."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


Positive = Annotated[int, Field(ge=1)]
NotNegative = Annotated[int, Field(ge=0)]
Fraction = Annotated[float, Field(ge=0, le=1)]


MODEL_TABLES: dict[str, type[Described]] = {
    "rope_scaling": RopeScaling,
    "moe": MoESpec,
    "latent_attention": LatentAttentionSpec,
}


def _overrides(name: str, spec: type[Described]) -> Any:
    """A section in which every field of `spec` may be given, and none has to be."""

    def override(field: dataclasses.Field[Any]) -> Any:
        table = MODEL_TABLES.get(field.name)
        kind: Any = field.type if table is None else _overrides(f"{table.__name__}Section", table)
        return (kind | None, Field(None, description=field.metadata["help"]))

    changes = {field.name: override(field) for field in dataclasses.fields(spec)}
    return create_model(name, __base__=Section, __doc__=spec.__doc__, **changes)


_ModelOverrides: Any = _overrides("_ModelOverrides", ModelSpec)


class ModelSection(_ModelOverrides):
    """The model: a preset, and any size of it changed."""

    preset: str = Field("debug", description="a named model to start from; every other key here changes it")

    def spec(self) -> ModelSpec:
        """The preset with the changes. Raises ConfigError for an unknown preset, or for a table that the preset does
        not have and that is not given whole."""
        preset = resolve(self.preset)
        changes = {k: v for k in self.model_fields_set - {"preset"} if (v := getattr(self, k)) is not None}
        problems: list[str] = []
        for name in changes.keys() & MODEL_TABLES.keys():
            inner = changes[name].model_dump(exclude_none=True)
            if (base := getattr(preset, name)) is not None:
                changes[name] = dataclasses.replace(base, **inner)
                continue
            required = [f for f in dataclasses.fields(MODEL_TABLES[name]) if f.default is dataclasses.MISSING]
            missing = [field for field in required if field.name not in inner]
            problems += [
                f"model.{name}.{field.name}: missing, and model.preset={self.preset!r} has no {name} to take it from; "
                f"it is {field.metadata['help'][0].lower()}{field.metadata['help'][1:].rstrip('.')}"
                for field in missing
            ]
            if not missing:
                changes[name] = MODEL_TABLES[name](**inner)
        if problems:
            raise ConfigError(*problems)
        return dataclasses.replace(preset, **changes)


class DataSection(Section):
    """Where the tokens are and how sequences are made of them."""

    path: str = Field(description="a folder written by `shardwright data prepare`")
    sequences: Literal["packed", "documents"] = Field(
        "packed",
        description="packed: documents one after another, split every seq_len tokens; "
        "documents: each document starts a sequence, the rest of it is padding that does not count",
    )
    mask_boundaries: bool = Field(False, description="packed only: leave the first token of a document out of the loss")
    prefetch: Positive = Field(2, description="steps of data that are read ahead")


class BatchSection(Section):
    """The batch of one step. Gradient accumulation: global_batch / (micro_batch x data ranks) micro-batches a rank."""

    seq_len: Positive = Field(description="tokens of a sequence")
    global_batch: Positive = Field(description="sequences of a step, over all ranks")
    micro_batch: Positive = Field(1, description="sequences a rank runs at a time; sets the activation memory")


def _layout_key(key: LayoutKey) -> Any:
    """A field of [layout]: optional where the layout derives its default from other keys."""

    def valid(value: Any) -> Any:
        if rule := key.problem(value):
            raise PydanticCustomError("layout", "{rule}", {"rule": rule})
        return value

    kind = list[Positive] if key.name == "stage_layers" else key.type
    kind = Annotated[kind, AfterValidator(valid)]
    return (kind if key.default is not None else kind | None, Field(key.default, description=key.help))


_LayoutKeys: Any = create_model(
    "_LayoutKeys", __base__=Section, **{name: _layout_key(key) for name, key in LAYOUT_KEYS.items()}
)


class LayoutSection(_LayoutKeys):
    """How ranks partition model and batch. World size: dp_replicate x dp_shard x cp x tp x pp; ep lies within."""

    def layout(self) -> Layout:
        """The arithmetic of these degrees. Raises LayoutError."""
        values = self.model_dump()
        values |= {name: tuple(value) for name, value in values.items() if isinstance(value, list)}
        return Layout(**values)


class OptimizerSection(Section):
    """The optimizer, its learning rate and its options; which options there are depends on `name`."""

    model_config = ConfigDict(extra="allow")

    name: str = Field("adamw", description="adamw, or an optimizer registered by an extension")
    lr: float = Field(3e-4, gt=0, description="peak learning rate")
    weight_decay: float = Field(0.1, ge=0, description="decoupled decay of matrices; vectors are never decayed")
    clip_norm: float = Field(
        1.0, ge=0, description="gradients are scaled down to this global norm if it is larger; 0: never"
    )

    @model_validator(mode="before")
    @classmethod
    def _with_default_options(cls, given: Any) -> Any:
        kind = OPTIMIZERS.get(given.get("name", "adamw")) if isinstance(given, dict) else None
        return given if kind is None else {key: option.default for key, option in kind.options.items()} | given

    @model_validator(mode="after")
    def _options_are_known(self) -> "OptimizerSection":
        kind = OPTIMIZERS.get(self.name)
        if kind is None:
            raise _Refused(f"optimizer.name={self.name!r} is not known; {nearest(self.name, OPTIMIZERS)}")
        found = []
        for key, value in (self.model_extra or {}).items():
            option = kind.options.get(key)
            if option is None:
                valid = [*type(self).model_fields, *kind.options]
                found.append(f"optimizer.{key}: there is no such key for {self.name!r}; {nearest(key, valid)}")
            elif isinstance(value, bool) or not isinstance(value, int | float):
                found.append(f"optimizer.{key}={value!r}: a number is needed")
            elif not option.least <= value < option.below:
                rule = f"from {option.least:g}" + (f" to below {option.below:g}" if option.below < math.inf else "")
                found.append(f"optimizer.{key}={value:g} is not {rule}")
        if found:
            raise _Refused(*found)
        return self

    @property
    def kind(self) -> OptimizerKind:
        """The row of the optimizer."""
        return OPTIMIZERS[self.name]

    @property
    def options(self) -> dict[str, float]:
        """The value of each of its options."""
        return {key: float(value) for key, value in (self.model_extra or {}).items()}


class ScheduleSection(Section):
    """The learning rate over the steps, as a fraction of optimizer.lr."""

    shape: Literal["cosine", "wsd", "constant"] = Field(
        "cosine", description="after warm-up: half a cosine; warm-up, stable, linear decay; or flat"
    )
    warmup_steps: NotNegative = Field(0, description="steps of linear rise from zero")
    decay_steps: NotNegative = Field(0, description="wsd only: steps of linear fall at the end")
    final_fraction: Fraction = Field(0.1, description="final learning rate, as a fraction of the peak")


class PrecisionSection(Section):
    """The type of matmuls, and compilation."""

    compute: Literal["fp32", "bf16", "fp64"] = Field(
        "fp32",
        description="type of matmuls; with bf16 the weights, the reduction of gradients and "
        "their accumulation stay in fp32",
    )
    compile: bool = Field(False, description="compile each block, and the loss, with torch.compile")


class CheckpointSection(Section):
    """When checkpoints are saved, and whether a run resumes from one."""

    every: NotNegative = Field(0, description="steps between checkpoints; 0: only at the end and when stopped")
    keep_last: Positive = Field(2, description="older checkpoints are deleted once a newer one is published")
    resume: str = Field(
        "no",
        description="no: start anew, refuse a folder that holds a run; auto: go on from the last good checkpoint "
        "if there is one; or the path of a checkpoint, of this or another run",
    )


class MetricsSection(Section):
    """What is written while training. JSON lines always go to OUT/metrics.jsonl."""

    every: Positive = Field(10, description="steps between logged lines; logging synchronises with the accelerator")
    tensorboard: bool = Field(False, description="also write TensorBoard events (extra: tensorboard)")
    wandb_project: str | None = Field(None, description="also log to this W&B project (extra: wandb)")


class EvaluationSection(Section):
    """Validation loss."""

    every: NotNegative = Field(0, description="steps between evaluations; 0: only before and after training")
    samples: NotNegative = Field(64, description="sequences evaluated, the same ones each time; 0: no evaluation")


class RunConfig(Section):
    """A whole run."""

    out: str = Field(min_length=1, description="folder of the run: resolved run file, metrics, checkpoints, pictures")
    steps: Positive = Field(description="optimizer steps")
    seed: NotNegative = Field(0, description="of initial weights, data order and dropout")
    device: Literal["auto", "cpu", "cuda"] = Field("auto", description="auto: cuda where there is one")
    extensions: list[str] = Field(
        [],
        description="Python files (.py, relative to the run file) or modules that register schedules, optimizers or "
        "families of models of your own; imported before the rest of the run file is read",
    )
    model: ModelSection = Field(default_factory=ModelSection)
    data: DataSection
    batch: BatchSection
    layout: LayoutSection = Field(default_factory=LayoutSection)
    optimizer: OptimizerSection = Field(default_factory=OptimizerSection)
    lr_schedule: ScheduleSection = Field(default_factory=ScheduleSection)
    precision: PrecisionSection = Field(default_factory=PrecisionSection)
    checkpoint: CheckpointSection = Field(default_factory=CheckpointSection)
    metrics: MetricsSection = Field(default_factory=MetricsSection)
    evaluation: EvaluationSection = Field(default_factory=EvaluationSection)

    @property
    def accumulation(self) -> int:
        """Micro-batches a rank runs in one step. Raises LayoutError where that is not a whole number."""
        return accumulation(self.batch.global_batch, self.batch.micro_batch, self.layout.layout().data_ranks)

    def problems(self) -> list[str]:
        """Every rule between keys that is broken, one sentence each."""
        return _broken_rules(dict(self))


def _broken_rules(valid: Mapping[str, Any]) -> list[str]:
    """Every rule between keys that is broken, one sentence each. `valid`: sections and keys at the top of a run file by
    name; a rule between some of which one is not there is not looked at."""
    found: list[str] = []
    model, batch, data, lr_schedule = (valid.get(name) for name in ("model", "batch", "data", "lr_schedule"))
    spec, layout = None, None
    try:
        spec = model and model.spec()
    except ConfigError as error:
        found += error.problems
    spec_problems = spec.problems() if spec else []
    found += [f"model.{problem}" for problem in spec_problems]
    if spec and batch and batch.seq_len > spec.max_seq_len:
        found.append(
            f"batch.seq_len={batch.seq_len} is longer than model.max_seq_len={spec.max_seq_len}; "
            f"shorten the one or raise the other"
        )
    try:
        layout = valid["layout"].layout() if "layout" in valid else None
    except LayoutError as error:
        found += error.problems
    if layout and batch:
        try:
            found += schedule_problems(layout, accumulation(batch.global_batch, batch.micro_batch, layout.data_ranks))
        except LayoutError as error:
            found += error.problems
        if spec and not spec_problems:
            found += split_problems(spec, layout, batch.seq_len)
    if lr_schedule:
        found += _lr_schedule_problems(lr_schedule, valid.get("steps"))
    if data and data.mask_boundaries and data.sequences != "packed":
        found.append(
            "data.mask_boundaries=true goes with data.sequences='packed'; in 'documents' no sequence crosses a boundary"
        )
    return found


def _lr_schedule_problems(section: ScheduleSection, steps: int | None) -> Iterator[str]:
    """`steps` of the run; None where that number is not valid."""
    changing = {"warmup_steps": section.warmup_steps}
    if section.shape == "wsd":
        changing["decay_steps"] = section.decay_steps
        if not section.decay_steps:
            yield "lr_schedule.decay_steps=0 with lr_schedule.shape='wsd' never falls; give the steps of its fall"
    elif section.decay_steps:
        yield (
            f"lr_schedule.decay_steps={section.decay_steps} is for lr_schedule.shape='wsd'; shape is {section.shape!r}"
        )
    if steps is not None and sum(changing.values()) > steps:
        given = " + ".join(f"{name}={number}" for name, number in changing.items())
        yield f"lr_schedule.{given} is more than the steps={steps} of the run"


def load(path: str | Path, overrides: Sequence[str] = ()) -> RunConfig:
    """Read a run file and apply `key=value` overrides such as `layout.dp_shard=2`.

    Raises ConfigError with every problem of the file and of the overrides at once.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such run file") from None
    except IsADirectoryError:
        raise ConfigError(f"{path} is a folder; a run file is TOML, like those in examples/") from None
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not UTF-8 text (byte {error.start}); a run file is TOML") from None
    try:
        table = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path}: not valid TOML: {error}") from None
    return parse(table, overrides, source=str(path), folder=Path(path).parent)


def parse(
    table: dict[str, Any], overrides: Sequence[str] = (), source: str = "run file", folder: Path = Path()
) -> RunConfig:
    """Validate a run file that is already a table, and import its extensions, whose paths are relative to `folder`.

    Raises ConfigError with every problem at once.
    """
    problems: list[str] = []
    for override in overrides:
        problems += _apply(table, override)
    problems += extensions.load_named(table, folder)
    try:
        config = RunConfig.model_validate(table)
    except ValidationError as error:
        for entry in error.errors():
            problems += entry["ctx"]["problems"] if entry["type"] == "refused" else [_sentence(entry)]
        problems += _broken_rules(_valid_part(table, error))
        raise ConfigError(*(f"{source}: {problem}" for problem in problems)) from None
    problems += config.problems()
    if problems:
        raise ConfigError(*(f"{source}: {problem}" for problem in problems))
    return config


def _valid_part(table: dict[str, Any], error: ValidationError) -> dict[str, Any]:
    """The sections and keys at the top of a run file in which pydantic found nothing wrong, by name."""
    wrong = {entry["loc"][0] for entry in error.errors()}
    found: dict[str, Any] = {}
    for name, field in RunConfig.model_fields.items():
        if name in wrong:
            continue
        section = _section_of(field.annotation)
        if name not in table:
            found[name] = field.get_default(call_default_factory=True)
        else:
            found[name] = section.model_validate(table[name]) if section else table[name]
    return found


def _apply(table: dict[str, Any], override: str) -> list[str]:
    path, equals, text = override.partition("=")
    if not equals:
        return [f"--set {override}: write key=value, such as --set layout.dp_shard=2"]
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        value = text
    *sections, key = path.strip().split(".")
    for section in sections:
        below = table.setdefault(section, {})
        if not isinstance(below, dict):
            return [f"--set {override}: {section} is a value, not a section"]
        table = below
    table[key] = value
    return []


RENAMED = {"schedule": "lr_schedule", "layout.schedule": "layout.pp_schedule"}
"""Old names of keys and sections, and what they are called now."""


def _sentence(entry: Any) -> str:
    """One of pydantic's errors in our words."""
    path = [str(part) for part in entry["loc"]]
    key = ".".join(path)
    if entry["type"] == "extra_forbidden" and key in RENAMED:
        return f"{key} is called {RENAMED[key]} now; rename it"
    if entry["type"] == "extra_forbidden":
        return f"{key}: there is no such key; {_meant(path)}"
    if entry["type"] == "missing":
        field = _owner(path).model_fields[path[-1]]
        it = field.description or f"the section [{path[-1]}]: {model_of(field.annotation).__doc__.splitlines()[0]}"
        return f"{key}: missing, and there is no default; it is {it}"
    if entry["type"] in ("model_type", "model_attributes_type"):
        return f"{key}={entry['input']!r}: this is a section, written [{key}]"
    said = f"{key}={entry['input']!r}: {entry['msg'][0].lower() + entry['msg'][1:]}"
    if entry["type"] == "literal_error":
        hint = nearest(str(entry["input"]), re.findall(r"'([^']*)'", entry["ctx"]["expected"]))
        return f"{said}; {hint}" if hint.startswith("did") else said
    return said


def _meant(path: Sequence[str]) -> str:
    """The key that was meant by one that does not exist: of the same section, or of that name in another."""
    *_, name = path
    if called_here(name) is None and (elsewhere := [key for key in _paths(RunConfig) if key.split(".")[-1] == name]):
        return f"did you mean {' or '.join(map(repr, elsewhere))}?"
    return nearest(name, _owner(path).model_fields)


def _paths(section: Any, prefix: str = "") -> Iterator[str]:
    """Every key of a section, and of the sections in it."""
    for name, field in section.model_fields.items():
        yield prefix + name
        if inner := _section_of(field.annotation):
            yield from _paths(inner, f"{prefix}{name}.")


def model_of(annotation: Any) -> Any:
    """The section that a field of a run file holds."""
    found = _section_of(annotation)
    assert found is not None, annotation
    return found


def _section_of(annotation: Any) -> Any:
    """The section that a field of a run file holds; None where it is no section."""
    options = [annotation, *getattr(annotation, "__args__", ())]
    return next((option for option in options if isinstance(option, type) and issubclass(option, BaseModel)), None)


def _owner(path: Sequence[str]) -> Any:
    """The section that the last of these names is a key of."""
    owner: Any = RunConfig
    for part in path[:-1]:
        owner = model_of(owner.model_fields[part].annotation)
    return owner


def resolved_toml(config: RunConfig) -> str:
    """A configuration as a run file with every default filled in; reading it back gives an equal one."""
    lines = ["# resolved by shardwright; `shardwright train` accepts this file"]
    values = config.model_dump(exclude_none=True)
    layout = config.layout.layout()
    values["layout"] = {name: value for name in LAYOUT_KEYS if (value := getattr(layout, name)) is not None}
    lines += [f"{key} = {as_toml(value)}" for key, value in values.items() if not isinstance(value, dict)]
    for name, section in values.items():
        if isinstance(section, dict):
            lines += ["", f"[{name}]", *(f"{key} = {as_toml(value)}" for key, value in section.items())]
    return "\n".join(lines) + "\n"


def as_toml(value: Any) -> str:
    """A value as it is written in a run file."""
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{key} = {as_toml(below)}" for key, below in value.items()) + " }"
    return json.dumps(value, ensure_ascii=False)
