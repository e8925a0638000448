"""NeMo, Megatron-Bridge and MLPerf's config_*.sh: other names for the options of Megatron-LM, which all three run."""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from shardwright.cost.job import RECOMPUTE, Candidates
from shardwright.planner.choice import Choice
from shardwright.readers.megatron import MEGATRON_LM
from shardwright.readers.table import NO_EFFECT, DescribedRun, ForeignOption, Setting, System, Values, normalised, shown
from shardwright.system.errors import InputError

_OPTIONS = MEGATRON_LM.options
_SECTIONS = ("model", "train", "ddp", "optimizer", "comm_overlap", "mixed_precision", "dataset", "tokenizer")
"""Sections of YAML whose keys have the names of Megatron-LM's options."""
_RENAMED = {
    "trainer.devices": "nproc_per_node",
    "trainer.num_nodes": "nnodes",
    "model.encoder_seq_length": "seq_length",
    "model.data.seq_length": "seq_length",
    "dataset.sequence_length": "seq_length",
    "model.tokenizer.type": "tokenizer_type",
    "model.tokenizer.model": "tokenizer_model",
    "model.rotary_percentage": "rotary_percent",
    "model.bias": "add_bias_linear",
    "model.use_flash_attention": "use_flash_attn",
    "model.ub_tp_comm_overlap": "tp_comm_overlap",
    "model.fp8_hybrid": "model.fp8_hybrid",
    "model.fp8_e4m3": "model.fp8_e4m3",
    "model.optim.overlap_grad_sync": "overlap_grad_reduce",
}
"""Key of YAML -> option of Megatron-LM, where the last part of the key is not its name."""
_OTHER_ARCHITECTURES = (
    r"(?<![a-z0-9])(mamba|griffin|retro|hyena|t5|bert|bart|ul2|clip|neva|imagen|nmt|diffusion|speech|vit)(?![a-z])"
)
"""Words in the name of a NeMo configuration whose model is no decoder-only transformer."""
_PRECISIONS: Mapping[str, Mapping[str, Any]] = {
    r"(bf16|bfloat16)\b.*|bf16_mixed": {"bf16": True},
    r"(16|fp16)\b.*|fp16_mixed": {"fp16": True},
    r"bf16_with_fp8_delayed\w*": {"bf16": True, "fp8_format": "hybrid", "fp8_recipe": "delayed"},
    r"bf16_with_fp8_current\w*": {"bf16": True, "fp8_format": "hybrid", "fp8_recipe": "tensorwise"},
    r"bf16_with_fp8_subchannel\w*": {"bf16": True, "fp8_format": "e4m3", "fp8_recipe": "blockwise"},
    r"bf16_with_mxfp8\w*": {"bf16": True, "fp8_format": "e4m3", "fp8_recipe": "mxfp8"},
    r"32\b.*|fp32": {},
}
_VALUES: Mapping[str, Mapping[str, Mapping[str, Any]]] = {
    "trainer.precision": _PRECISIONS,
    "model.precision": _PRECISIONS,
    "mixed_precision": _PRECISIONS,
    "mixed_precision.dtype": _PRECISIONS,
    "model.fp8": {"true": {"fp8_format": "hybrid"}, "false": {}},
    "model.normalization": {
        "rmsnorm": {"normalization": "RMSNorm"},
        "layernorm|layernorm1p|low_precision_layernorm": {"normalization": "LayerNorm"},
    },
    "model.activation": {
        "gelu": {},
        "(fast-)?swiglu": {"swiglu": True},
        "squared-relu": {"squared_relu": True},
        "(fast-)?geglu": {"quick_geglu": True},
        "openai-gelu": {"openai_gelu": True},
    },
    "model.optim.name": {
        "distributed_fused_adam|mcore_distributed_optim": {"optimizer": "adam", "use_distributed_optimizer": True},
        "(megatron_)?fused_adam|adamw?": {"optimizer": "adam"},
    },
}
"""Key of YAML -> pattern of its value -> options of Megatron-LM."""


def _without_effect(reasons: Mapping[str, str]) -> tuple[ForeignOption, ...]:
    """Return rows for the starts of names that change neither time nor memory. `reasons`: reason -> names."""
    return tuple(
        ForeignOption(name, note=reason, fate=NO_EFFECT) for reason, names in reasons.items() for name in names.split()
    )


_OF_YAML = _without_effect(
    {
        "logging, data, rates and checkpoints are not part of a step": "exp_manager. run. hydra. name restore_from_ "
        "model.data. model.tokenizer. model.optim. model.nsys_profile trainer. logger. checkpoint. scheduler. rng. "
        "profiling. dataset. tokenizer. dist. validation. straggler. model._target_ _target_",
        "with this value Megatron-LM does without the option": "mixed_precision model.precision model.activation "
        "model.fp8",
        "NeMo's own kernels, buffers and defaults, which the stack's prices include": "mcore_gpt transformer_engine "
        "megatron_amp_ native_amp_ precision gradient_as_bucket_view grad_allreduce_chunk_size_mb headscale "
        "transformer_block_type attention_type sync_batch_comm pre_process post_process reduce_amax use_emha "
        "apex_transformer_ gc_interval resume_from_checkpoint ffn_dropout "
        "seq_len_interpolation_factor activations_checkpoint_layers_per_pipeline num_micro_batches_with_partial_",
    }
)
_LAUNCH = "it concerns the launch of MLPerf"
_OF_VARIABLES = _without_effect(
    {
        _LAUNCH: "dgxsystem walltime nccl_ nvte_ cuda_ slurm sharp mlperf_ torch_ omp_ max_steps "
        "val_ lr load_ target_ nexp cont_ container logdir ub_ nemo_ hydra_ bind_ mc_ extra_ check_ warmup api_log",
    }
)


def yaml_settings(settings: Sequence[Setting]) -> list[Setting]:
    """Return the keys of YAML as options of Megatron-LM. `${a.b}` is the value of another key of the file."""
    by_name = {setting.option: setting for setting in settings}
    name = by_name.get("name")
    if name is not None and (other := re.search(_OTHER_ARCHITECTURES, str(name.value), re.IGNORECASE)):
        raise InputError(
            f"{name.where}: name {shown(name.value)}: a model of the kind {other[0]} has no price; supported: "
            f"decoder-only transformers, such as megatron_gpt"
        )
    result: list[Setting] = []
    for given in settings:
        setting = _interpolated(given, by_name)
        # Sections of the first versions of Megatron-Bridge, such as model_config.
        setting = replace(setting, option=re.sub(r"^(\w+)_config\.", r"\1.", setting.option))
        section, _, leaf = setting.option.rpartition(".")
        choices = _VALUES.get(setting.option)
        if choices is not None and setting.value is not None:
            result += _by_value(setting, choices)
        elif setting.option in _RENAMED:
            result.append(replace(setting, option=_RENAMED[setting.option]))
        elif section in _SECTIONS and (leaf in _OPTIONS or section in _SECTIONS[:3]):
            result.append(replace(setting, option=leaf))
        else:
            result.append(setting)
    return result


def _by_value(setting: Setting, choices: Mapping[str, Mapping[str, Any]]) -> Iterable[Setting]:
    text = str(setting.value)
    for pattern, options in choices.items():
        if re.fullmatch(pattern, text, re.IGNORECASE):
            return [Setting(name, value, setting.where) for name, value in options.items()] or [setting]
    leaf = setting.option.rpartition(".")[2]
    if leaf in ("name", "normalization"):  # the table of options lists the valid ones
        return [Setting({"name": "optimizer"}.get(leaf, leaf), text, setting.where)]
    raise InputError(f"{setting.where}: {setting.option} {text}: not known; supported: {', '.join(choices)}")


def _interpolated(setting: Setting, by_name: Mapping[str, Setting]) -> Setting:
    """Return a setting with the value that OmegaConf's `${key}` stands for, or with the reason why it is unknown."""
    seen, name = {setting.option}, setting.option
    value = setting.value
    while isinstance(value, str) and (form := re.fullmatch(r"\$\{(\.*)([\w.]+)\}", value.strip())):
        section = name.split(".")[: -len(form[1])] if form[1] else []
        name = ".".join([*section, form[2]])
        if name in seen or name not in by_name:
            return replace(setting, value="", unknown=f"{setting.where}: {value} is not in the file")
        seen.add(name)
        value = by_name[name].value
    if isinstance(value, str) and "${" in value:
        return replace(setting, value="", unknown=f"{setting.where}: {value} would have to be evaluated")
    return replace(setting, value=value)


def write(described: DescribedRun, choice: Choice) -> dict[str, Any]:
    """Return the options of a layout. YAML states the number of virtual stages instead of their layers."""
    options = MEGATRON_LM.write(described, choice)
    layers = options.pop("num_layers_per_virtual_pipeline_stage")
    virtual = choice.layout.virtual_stages if layers else None
    return options | {"virtual_pipeline_model_parallel_size": virtual}


_BY_TRAINER = ("bf16", "use_distributed_optimizer")
"""Options that trainers set if a file does not have them."""
_OF_NEMO = {
    "recompute_granularity": "activations_checkpoint_granularity",
    "recompute_method": "activations_checkpoint_method",
    "recompute_num_layers": "activations_checkpoint_num_layers",
}


def _write_nemo(described: DescribedRun, choice: Choice) -> dict[str, Any]:
    options = {_OF_NEMO.get(name, name): value for name, value in write(described, choice).items()}
    distributed = options.pop("use_distributed_optimizer", None)
    return options | {"model.optim.name": "distributed_fused_adam" if distributed else "fused_adam"}


def _spell(places: Mapping[str, str]) -> Callable[[str], str]:
    return lambda name: places.get(name, name if "." in name else f"model.{name}")


NEMO = replace(
    MEGATRON_LM,
    name="NeMo",
    families=(*_OF_YAML, *MEGATRON_LM.families),
    spell=_spell({option: key for key, option in _RENAMED.items() if key.startswith("trainer.")}),
    write=_write_nemo,
)


def _describe_bridge(values: Values) -> DescribedRun:
    """Return the run; files of Megatron-Bridge change a recipe, which sets the options that a file does not."""
    absent = [name for name in _BY_TRAINER if not values.given(name)]
    if values.given("fp16"):
        absent = [name for name in absent if name != "bf16"]
    values.settings = {name: Setting(name, True, values.source) for name in absent} | dict(values.settings)
    if absent:
        values.assumed.append(f"{' and '.join(absent)}, as the recipes of Megatron-Bridge set them")
    return MEGATRON_LM.describe(values)


MEGATRON_BRIDGE = replace(
    NEMO,
    name="Megatron-Bridge",
    describe=_describe_bridge,
    spell=_spell(
        {
            "micro_batch_size": "train.micro_batch_size",
            "global_batch_size": "train.global_batch_size",
            "use_distributed_optimizer": "ddp.use_distributed_optimizer",
            "optimizer": "optimizer.optimizer",
        }
    ),
    write=write,
)
_VARIABLES = {
    "TENSOR_MODEL_PARALLEL": "tensor_model_parallel_size",
    "PIPELINE_MODEL_PARALLEL": "pipeline_model_parallel_size",
    "INTERLEAVED_PIPELINE": "virtual_pipeline_model_parallel_size",
    "CONTEXT_PARALLEL": "context_parallel_size",
    "EXPERT_MODEL_PARALLEL": "expert_model_parallel_size",
    "SEQ_PARALLEL": "sequence_parallel",
    "MICRO_BATCH_SIZE": "micro_batch_size",
    "GLOBAL_BATCH_SIZE": "global_batch_size",
    "SEQ_LENGTH": "seq_length",
    "DGXNNODES": "nnodes",
    "DGXNGPU": "nproc_per_node",
    "TP_COMM_OVERLAP": "tp_comm_overlap",
    "FP8": "fp8_hybrid",
    "ASYM_PP_EMBED": "account_for_embedding_in_pipeline_split",
    "ASYM_PP_LOSS": "account_for_loss_in_pipeline_split",
    "USE_DIST_OPTIMIZER": "use_distributed_optimizer",
    "DEFER_EMBEDDING_WGRAD_COMPUTE": "defer_embedding_wgrad_compute",
}
"""Variable of MLPerf's config_*.sh -> option of Megatron-LM."""
MINIBS = "MINIBS"
"""Samples of a data-parallel rank in a step."""
_WRITTEN = set(_VARIABLES.values()) - {"use_distributed_optimizer"}


def is_mlperf(variables: Iterable[str]) -> bool:
    """Return whether variables of a shell script configure a run of MLPerf."""
    return "TENSOR_MODEL_PARALLEL" in set(variables)


def mlperf_settings(variables: Sequence[Setting]) -> list[Setting]:
    """Return the variables of MLPerf's config_*.sh as options of Megatron-LM."""
    renamed = [replace(setting, option=_VARIABLES.get(setting.option, setting.option)) for setting in variables]
    return [
        replace(setting, option="samples_per_data_rank") if setting.option == MINIBS else setting for setting in renamed
    ]


def _describe_mlperf(values: Values) -> DescribedRun:
    """Return the run; MLPerf's trainer sets bf16 and the distributed optimizer, and the samples of a data rank."""
    values.assumed.append("bf16 and the distributed optimizer, as MLPerf's trainers with NeMo set them")
    own = {name: Setting(name, True, values.source) for name in _BY_TRAINER}
    values.settings = own | dict(values.settings)
    described = MEGATRON_LM.describe(values)
    if samples := values["samples_per_data_rank"]:
        if values.given("global_batch_size"):
            return described
        described = replace(described, global_batch=samples * described.layout.data_ranks)
        values.assumed[:] = [remark for remark in values.assumed if "one micro-batch a data rank" not in remark]
    return described


def _able_mlperf(described: DescribedRun, candidates: Candidates) -> Any:
    """Return the mask of the layouts that the variables can express: recomputation and ZeRO stay as they are."""
    same = candidates.recompute == RECOMPUTE.index(described.layout.recompute)
    return MEGATRON_LM.able(described, candidates) & same & (candidates.zero == described.layout.zero)


MLPERF = replace(
    NEMO,
    name="MLPerf",
    families=(*_OF_VARIABLES, *MEGATRON_LM.families),
    options={
        **_OPTIONS,
        "samples_per_data_rank": ForeignOption("samples_per_data_rank", "batch.global_batch", int, note="x data ranks"),
        "cont": ForeignOption("cont", note=_LAUNCH, fate=NO_EFFECT),
    },
    spell=lambda name: {option: key for key, option in _VARIABLES.items()}.get(name, name.upper()),
    describe=_describe_mlperf,
    able=_able_mlperf,
    write=lambda described, choice: {
        name: value for name, value in write(described, choice).items() if name in _WRITTEN
    },
)


def argument_settings(settings: Sequence[Setting]) -> tuple[list[Setting], list[str]] | None:
    """Return the options of Megatron-LM in the section MODEL_ARGS, as its functional tests have them, and the names of
    the other sections; None without such a section. A flag that is false is left out, as their launcher does."""
    prefix = "MODEL_ARGS."
    own = [
        replace(setting, option=setting.option.removeprefix(prefix))
        for setting in settings
        if setting.option.startswith(prefix)
    ]
    others = dict.fromkeys(
        setting.option.partition(".")[0] for setting in settings if not setting.option.startswith(prefix)
    )
    return ([setting for setting in own if setting.value is not False], list(others)) if own else None


def yaml_system(settings: Sequence[Setting]) -> System | None:
    """Return the system of a YAML file, if it is NeMo or Megatron-Bridge."""
    names = {normalised(setting.option) for setting in settings}
    sections = {name.partition(".")[0].removesuffix("_config") for name in names if "." in name}
    if "model" in sections and "trainer" in sections:
        return NEMO
    return MEGATRON_BRIDGE if "model" in sections or "train" in sections else None
