"""The configuration of a whole run, and the rules between its sections."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any, Literal

from pydantic import Field

from shardwright.config.average import AverageSection, average_problems
from shardwright.config.batch import BatchSection, data_problems, stage_problems
from shardwright.config.checkpoint import CheckpointSection, checkpoint_problems
from shardwright.config.faults import FaultsSection, fault_problems
from shardwright.config.metrics import MetricsSection, ProfileSection, profile_problems
from shardwright.config.mixture import mixture_problems
from shardwright.config.optimizer import OptimizerSection
from shardwright.config.precision import PrecisionSection
from shardwright.config.sections import (
    PATH,
    DataSection,
    EvaluationSection,
    InitSection,
    LayoutSection,
    LoraSection,
    ModelSection,
    NotNegative,
    Positive,
    PreferenceSection,
    RunFileSection,
    ScheduleSection,
)
from shardwright.layout.keys import AUTO, ERROR_FEEDBACK
from shardwright.layout.layout import Layout, accumulation
from shardwright.model.modules import FAMILIES
from shardwright.model.number_formats import problems as fp8_problems
from shardwright.model.spec import ModelSpec
from shardwright.split.rules import pair_loss_problems, tp_divides
from shardwright.split.rules import problems as split_problems
from shardwright.split.stages import schedule_problems
from shardwright.system.errors import ConfigError, LayoutError, collecting
from shardwright.system.remote import REMOTE


class RunConfig(RunFileSection):
    """A whole run."""

    out: str = Field(
        min_length=1,
        json_schema_extra=PATH,
        description="folder of the run: resolved run file, metrics, checkpoints, pictures",
    )
    steps: Positive = Field(description="optimizer steps")
    seed: NotNegative = Field(0, description="of initial weights, data order and dropout")
    device: Literal["auto", "cpu", "cuda"] = Field("auto", description="auto: cuda where there is one")
    memory_gib: Annotated[float, Field(gt=0)] | None = Field(
        None,
        description="GiB that a rank has, for layout.recompute='auto'; if not given, the memory of its GPU, or on CPU "
        "the memory of the machine over its ranks",
    )
    offload_path: str | None = Field(
        None,
        json_schema_extra=PATH,
        min_length=1,
        description="folder, best on a local disk, for the files of layout.offload_optimizer='disk', which have no "
        "names and end with the run; if not given, OUT/offload",
    )
    extensions: list[str] = Field(
        [],
        json_schema_extra=PATH,
        description="Python files (.py) or modules that register schedules, optimizers or "
        "families of models of your own; imported before the rest of the run file is read",
    )
    model: ModelSection = Field(default_factory=ModelSection)
    init: InitSection = Field(default_factory=InitSection)
    lora: LoraSection = Field(default_factory=LoraSection)
    data: DataSection
    batch: BatchSection
    layout: LayoutSection = Field(default_factory=LayoutSection)
    preference: PreferenceSection = Field(default_factory=PreferenceSection)
    optimizer: OptimizerSection = Field(default_factory=OptimizerSection)
    lr_schedule: ScheduleSection = Field(default_factory=ScheduleSection)
    precision: PrecisionSection = Field(default_factory=PrecisionSection)
    checkpoint: CheckpointSection = Field(default_factory=CheckpointSection)
    metrics: MetricsSection = Field(default_factory=MetricsSection)
    profile: ProfileSection = Field(default_factory=ProfileSection)
    evaluation: EvaluationSection = Field(default_factory=EvaluationSection)
    average: AverageSection = Field(default_factory=AverageSection)
    faults: FaultsSection = Field(default_factory=FaultsSection)

    def spec(self) -> ModelSpec:
        """Return the model that is trained, with its adapters. Raises ConfigError as `ModelSection.spec`."""
        return replace(self.model.spec(), lora=self.lora.spec)

    @property
    def accumulation(self) -> int:
        """Return the micro-batches of a rank in one step of the first stage. Raises LayoutError if the number is not an
        integer."""
        return accumulation(self.batch.global_batch, self.batch.micro_batch, self.layout.layout().data_ranks)

    @property
    def by_stage(self) -> list["RunConfig"]:
        """Return for each stage of the batch the configuration of a run that has this batch in every step."""
        batch = self.batch
        if not batch.stages:
            return [self]
        return [self.model_copy(update={"batch": batch.stage_section(stage)}) for stage in batch.schedule.stages]

    def clock(self, step: int) -> int:
        """Return the argument of the learning-rate schedule after `step` steps: the steps, or their tokens."""
        return step if self.lr_schedule.by == "steps" else self.batch.schedule.tokens(step)

    def problems(self) -> list[str]:
        """Return one sentence for each broken rule between keys."""
        return broken_rules(dict(self))


def broken_rules(valid: Mapping[str, Any]) -> list[str]:
    """Return one sentence for each broken rule between keys. `valid`: top-level sections and keys of a run file by
    name. A rule is skipped if one of its keys is missing."""
    result: list[str] = []
    model, batch, data, lr_schedule = (valid.get(name) for name in ("model", "batch", "data", "lr_schedule"))
    spec, layout = None, None
    lengths: list[int] = []
    if REMOTE in (out := str(valid.get("out", ""))):
        result.append(f"out={out!r} is a URL; it is a folder of this machine: checkpoint.durable takes URLs")
    lora = valid.get("lora") or LoraSection()
    with collecting(result, ConfigError):
        spec = model and replace(model.spec(), lora=lora.spec)
    spec_problems = spec.problems() if spec else []
    if spec and spec.mup and (section := valid.get("optimizer")):
        result += section.mup_problems()
    result += [f"model.{problem}" for problem in spec_problems]
    result += _lora_problems(lora, spec if not spec_problems else None, valid.get("init"))
    with collecting(result, LayoutError):
        layout = valid["layout"].layout() if "layout" in valid else None
    if batch:
        result += (of_stages := stage_problems(batch, valid.get("steps")))
        stages = [batch] if of_stages else [batch.stage_section(stage) for stage in batch.schedule.stages]
        lengths = [stage.seq_len for stage in stages]
        for number, stage in enumerate(stages):
            problems = _batch_problems(stage, spec, bool(spec_problems), layout, valid.get("precision"))
            where = f"batch.stages.{number - 1}: " if number else ""
            result += [where + problem for problem in problems if problem not in result]
        result += data_problems(batch, data) if data and not of_stages else []
    if layout and (precision := valid.get("precision")):
        result += _compression_problems(layout, precision)
        result += _graph_problems(layout, precision, data)
    how, layers = valid["layout"].recomputation if "layout" in valid else ("none", None)
    if how == AUTO and layers is not None:
        result = [problem for problem in result if "recompute_layers" not in problem]
        result.append(
            f"layout.recompute_layers={layers} is decided by layout.recompute={AUTO!r}; leave it out, or set recompute "
            f"to 'selective' or 'full'"
        )
    if layout and (section := valid.get("optimizer")):
        result += section.kind.offload_problems(layout.offload_optimizer)
    if init := valid.get("init"):
        result += init.problems()
    if checkpoint := valid.get("checkpoint"):
        result += checkpoint_problems(checkpoint, layout)
    faults = valid.get("faults") or FaultsSection()
    result += fault_problems(faults, layout, data, valid.get("checkpoint"), valid.get("precision"))
    if average := valid.get("average"):
        result += average_problems(average, valid.get("steps"))
    if metrics := valid.get("metrics"):
        result += metrics.problems()
    if profile := valid.get("profile"):
        n_ranks = layout.world_size if layout else None
        result += profile_problems(profile, valid.get("steps"), n_ranks, valid.get("device", "auto"))
    if lr_schedule:
        result += _lr_schedule_problems(lr_schedule, valid.get("steps"))
    if data:
        result += mixture_problems(data, valid.get("steps"))
        result += _document_problems(data, None if spec_problems else spec)
    result += _preference_problems(valid.get("preference") or PreferenceSection(), data, spec, layout, lengths)
    return result


def _lora_problems(lora: LoraSection, spec: ModelSpec | None, init: InitSection | None) -> Iterator[str]:
    for name, field in LoraSection.model_fields.items():
        if not lora.rank and getattr(lora, name) != field.default:
            yield f"lora.{name}={getattr(lora, name)!r} is not used with lora.rank=0; set lora.rank, or leave it out"
    if spec is not None:
        yield from spec.lora_problems()
    if lora.rank and init is not None and init.optimizer:
        yield (
            f"init.optimizer=true with lora.rank={lora.rank}: new adapters have no moments yet; "
            f"leave init.optimizer out"
        )
    if lora.rank and init is not None and init.weights is None:
        yield (
            f"lora.rank={lora.rank} trains adapters of weights that stay as they are, and init.weights names none; set "
            f"init.weights, or leave [lora] out"
        )


def _batch_problems(
    batch: BatchSection,
    spec: ModelSpec | None,
    wrong_model: bool,
    layout: Layout | None,
    precision: PrecisionSection | None,
) -> list[str]:
    """Return the broken rules of the batch of one stage; `wrong_model`: the model itself breaks rules."""
    result = list(_length_problems(spec, batch)) if spec else []
    if layout:
        with collecting(result, LayoutError):
            result += schedule_problems(layout, accumulation(batch.global_batch, batch.micro_batch, layout.data_ranks))
        if spec and not wrong_model:
            result += split_problems(spec, layout, batch.seq_len)
            result += _fp8_problems(spec, layout, batch, precision)
    return result


def _length_problems(spec: ModelSpec, batch: BatchSection) -> Iterator[str]:
    if batch.seq_len > spec.max_seq_len:
        yield (
            f"batch.seq_len={batch.seq_len} is longer than model.max_seq_len={spec.max_seq_len}; "
            f"shorten the one or raise the other"
        )
    if batch.seq_len <= spec.mtp_modules:
        yield (
            f"model.mtp_modules={spec.mtp_modules} predict up to {spec.mtp_modules + 1} tokens ahead, and a sequence "
            f"has batch.seq_len={batch.seq_len} targets; valid: 0 to {batch.seq_len - 1}"
        )


def _fp8_problems(
    spec: ModelSpec, layout: Layout, batch: BatchSection, precision: PrecisionSection | None
) -> Iterator[str]:
    fp8 = None if precision is None else precision.fp8_settings
    if fp8 is not None and tp_divides(spec, layout.tp):
        yield from fp8_problems(spec, layout, fp8, batch.micro_batch * batch.seq_len // layout.cp)


def _compression_problems(layout: Layout, precision: PrecisionSection) -> Iterator[str]:
    """Yield the data types of matmuls that a layout with compressed communication does not support."""
    how = layout.compress_gradients
    for key, what in (("gradients", "gradients"), ("dispatch", "tokens"), ("pipeline", "activations")):
        value = getattr(layout, f"compress_{key}")
        if precision.compute == "fp64" and value != "none":
            yield (
                f"layout.compress_{key}={value!r} rounds {what} to fewer digits than precision.compute='fp64' is for; "
                f"leave it out, or set precision.compute to 'fp32' or 'bf16'"
            )
    if precision.compute not in ("fp32", "fp64") and how in ERROR_FEEDBACK:
        yield (
            f"layout.compress_gradients={how!r} needs matmuls in the type of the parameters, which are fp32, and here "
            f"precision.compute={precision.compute!r}; set precision.compute='fp32', or compress_gradients='bf16'"
        )


def _graph_problems(layout: Layout, precision: PrecisionSection, data: DataSection | None) -> Iterator[str]:
    """Yield the reasons why blocks cannot be replayed as CUDA graphs. Each call must find its weights, and store its
    gradients, at the same addresses as the recorded call."""
    if not precision.cuda_graphs:
        return
    needed = {
        "precision.compile=true": precision.compile,
        "precision.compute='bf16' or 'fp16'": precision.compute in ("bf16", "fp16"),
        "a layout of one rank": layout.world_size == 1,
        "layout.zero below 3": layout.zero < 3,
        "layout.offload_parameters='none'": layout.offload_parameters == "none",
        "layout.offload_activations='none'": layout.offload_activations == "none",
        "data.attention='sequence'": data is None or data.attention == "sequence",
    }
    missing = [name for name, holds in needed.items() if not holds]
    if missing:
        yield f"precision.cuda_graphs=true needs {', '.join(missing)}; set that, or leave precision.cuda_graphs out"


def _document_problems(data: DataSection, spec: ModelSpec | None) -> Iterator[str]:
    if data.mask_boundaries and data.sequences != "packed":
        yield (
            "data.mask_boundaries=true goes with data.sequences='packed'; in 'documents' no sequence crosses a boundary"
        )
    able = ", ".join(repr(name) for name, family in FAMILIES.items() if family.documents)
    if spec and spec.moe and data.sequences == "documents" and not FAMILIES[spec.family].documents:
        yield (
            f"data.sequences='documents' with experts in model.family={spec.family!r}: its blocks do not "
            f"take real tokens (`Family.documents`, docs/extending.md), so experts would compute padding; valid: "
            f"data.sequences='packed', or a family of {able}"
        )
    if data.attention == "sequence":
        if data.positions == "document":
            yield (
                "data.positions='document' goes with data.attention='document'; with attention over the sequence two "
                "tokens before a query would have the same position"
            )
        return
    if data.sequences != "packed":
        yield (
            f"data.attention='document' goes with data.sequences='packed'; in {data.sequences!r} a sequence has one "
            f"document, and attention is within it already"
        )
    if spec and not FAMILIES[spec.family].documents:
        yield (
            f"data.attention='document' with model.family={spec.family!r}: its blocks take no documents "
            f"(`Family.documents`, docs/extending.md); valid: data.attention='sequence', or a family of {able}"
        )


def _preference_problems(
    preference: PreferenceSection,
    data: DataSection | None,
    spec: ModelSpec | None,
    layout: Layout | None,
    lengths: Sequence[int],
) -> Iterator[str]:
    """Yield the broken rules of a loss on pairs. `lengths`: the seq_len of each stage of the batch."""
    kind = preference.kind
    for name in ("beta", "gamma"):
        if getattr(preference, name) == PreferenceSection.model_fields[name].default:
            continue
        if kind == "none" or (name == "gamma" and kind != "simpo"):
            needed = "'simpo'" if name == "gamma" else "'dpo', 'ipo' or 'simpo'"
            yield (
                f"preference.{name}={getattr(preference, name):g} is not used with preference.kind={kind!r}; set kind "
                f"to {needed}, or leave {name} out"
            )
    if kind == "none":
        return
    if data and (data.attention, data.positions) != ("document", "document"):
        yield (
            f"preference.kind={kind!r} with data.attention={data.attention!r} and data.positions={data.positions!r}: "
            f"the two answers of a pair are documents of one sequence; set both to 'document'"
        )
    if len(different := sorted(set(lengths))) > 1:
        yield (
            f"preference.kind={kind!r} with batch.stages of seq_len {' and '.join(map(str, different))}: a pair is not "
            f"cut; give every stage the same seq_len"
        )
    yield from pair_loss_problems(kind, spec, layout)


def _lr_schedule_problems(section: ScheduleSection, steps: int | None) -> Iterator[str]:
    """Yield problems of the learning rate schedule. `steps`: steps of the run; None if that value is not valid."""
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
        yield f"lr_schedule.{given} is more than the steps={steps} of the run; lower it, or raise steps"
