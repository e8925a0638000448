"""`[init] weights`: a new run that starts with existing weights, on any layout."""

from dataclasses import replace

import torch
from torch.distributed.tensor import DTensor

from shardwright.config import RunConfig, contradictions
from shardwright.config.sections import InitSection
from shardwright.model.modules import rows
from shardwright.model.spec import ModelSpec
from shardwright.parallel.boxes import local_box
from shardwright.system.errors import CheckpointError, InputError
from shardwright.system.units import format_count
from shardwright.training.optimizer import named_state, stored_state
from shardwright.training.step import Trainer
from shardwright.training.weights import CheckpointWeights, Weights, adapter_differences, by_reason, fill, open_weights


def initial_weights_problems(config: RunConfig) -> list[str]:
    """Return the reasons why a run cannot start with the given weights, one sentence each, without starting workers."""
    assert config.init.weights is not None
    try:
        weights = open_weights(config.init.weights)
    except InputError as error:
        return [f"init.weights: {problem}" for problem in error.problems]
    problems = _problems(weights, config.spec(), config.init)
    if config.init.optimizer and isinstance(weights, CheckpointWeights) and weights.optimizer is not None:
        kinds = {name.partition("/")[0] for name in weights.optimizer.shapes}
        wanted = config.optimizer.kind.names(rows(config.spec()).values(), config.optimizer.options)
        if kinds != wanted:
            problems.append(
                f"init.optimizer=true: {weights.path} has {', '.join(sorted(kinds))}, and optimizer.name="
                f"{config.optimizer.name!r} needs {', '.join(sorted(wanted))}; set init.optimizer=false"
            )
    return problems


def _problems(weights: Weights, spec: ModelSpec, init: InitSection) -> list[str]:
    setting = f"init.weights={init.weights!r}"
    if weights.spec.lora is not None and spec.lora is None:
        return [f"{setting} has adapters, and this run has none; merge them, or give [lora] too"]
    given, wanted = (replace(model, lora=None) for model in (weights.spec, spec))
    if problems := contradictions(given, wanted, setting):
        return problems
    if weights.spec.lora is not None:  # else it is a base, for which the adapters of the run are new
        problems = [f"{setting}: {problem}" for problem in adapter_differences(weights.spec.lora, spec)]
        if problems:
            return problems
    for name, row in rows(spec).items():
        saved = weights.shapes.get(name)
        if saved is None and row.kind != "balance" and not row.adapter:
            problems.append(f"{setting} has no {name}")
        elif saved is not None and saved != row.shape:
            problems.append(f"{setting}: {name} is {list(saved)}, and this model's {list(row.shape)}")
    if init.optimizer and (not isinstance(weights, CheckpointWeights) or weights.optimizer is None):
        problems.append(
            f"init.optimizer=true: {weights.path} has no moments of an optimizer, only a checkpoint of a run has; set "
            f"init.optimizer=false"
        )
    return problems


@torch.no_grad()
def begin_with(trainer: Trainer, init: InitSection) -> list[str]:
    """Fill this rank's parameters and, if requested, the moments of its optimizer. Each rank reads only its own part.

    Returns lines that list the loaded and the omitted tensors. Raises CheckpointError for weights of another model, and
    DamagedError for a file that changed after it was written.
    """
    assert init.weights is not None
    weights, model = open_weights(init.weights), trainer.model
    if problems := _problems(weights, model.spec, init):
        raise CheckpointError(*problems)
    fill(model.saved_parameters.items(), model.spec, weights, local_box)  # `fill_base` has read the frozen ones
    if init.optimizer:
        assert isinstance(weights, CheckpointWeights)
        assert weights.optimizer is not None
        moments = weights.optimizer
        stored = stored_state(trainer.optimizer, model.named_parameters.items())
        for name, tensor in named_state(trainer.optimizer, model.named_parameters.items()).items():
            local, offsets = local_box(tensor)
            part = moments.read(name, offsets, tuple(local.shape))
            if name in stored:
                stored[name].write((0,) * part.dim(), part)
            else:
                local.copy_(part)
    model.after_change()
    return _report_lines(trainer, weights, init)


def _report_lines(trainer: Trainer, weights: Weights, init: InitSection) -> list[str]:
    spec = trainer.model.spec
    types = sorted({weights.dtypes[name] for name in weights.shapes})
    parameter = next(iter(trainer.model.named_parameters.values()))
    dtype = str((parameter.to_local() if isinstance(parameter, DTensor) else parameter).dtype).removeprefix("torch.")
    kept = ", with the moments of the optimizer" if init.optimizer else ""
    absent = [name for name, row in rows(spec).items() if name not in weights.shapes and not row.adapter]
    left_out = {
        name: reason
        for name, reason in weights.left_out.items()
        if not (init.optimizer and reason == CheckpointWeights.WHY_NO_MOMENTS)
    }
    lines = [
        f"weights from {weights.describe()}: {len(weights.shapes):,} tensors, {format_count(spec.n_parameters)} "
        f"parameters, {', '.join(types)} to {dtype}{kept}; step and samples start from 0, the learning "
        "rate from the start of its schedule"
    ]
    if spec.lora is not None:
        lines.append(
            f"adapters of rank {spec.lora.rank}: {format_count(spec.n_trained_parameters)} of "
            f"{format_count(spec.n_parameters)} parameters are trained"
        )
        if spec.lora.base != "compute":
            lines.append(f"frozen matrices of layers are stored in {spec.lora.base} and converted for each matmul")
    lines += [f"not taken: {line}" for line in by_reason(left_out)]
    lines += [f"not there, as in a new model: {absent[0]} and {len(absent) - 1} more"] if absent else []
    return lines
