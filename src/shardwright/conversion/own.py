"""Training states in Shardwright's checkpoints."""

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from shardwright.config import RunConfig, load_kept
from shardwright.conversion.state import (
    MOMENTS,
    STEP,
    AdamWSettings,
    TrainingState,
    settings_of_run,
    trained_parameters,
)
from shardwright.hugging_face.files import shortened
from shardwright.hugging_face.writer import TensorToWrite
from shardwright.model.modules import row_of, rows
from shardwright.model.saved import differences, spec_as_json
from shardwright.model.spec import ModelSpec
from shardwright.runs.folder import CHECKPOINTS, RUN_FILE, published
from shardwright.system.errors import CheckpointError
from shardwright.system.units import in_groups
from shardwright.training.average import AVERAGE
from shardwright.training.checkpoint.manifest import (
    CheckpointManifest,
    TrainingProgress,
    sha256_of_text,
)
from shardwright.training.checkpoint.plan import TensorPiece
from shardwright.training.checkpoint.shards import tensor_records, write_shards
from shardwright.training.checkpoint.storage import name_of
from shardwright.training.device import DTYPES
from shardwright.training.importing import FILE_BYTES, row_blocks
from shardwright.training.kept import kept_run_file
from shardwright.training.sources import Sources
from shardwright.training.weights import MODEL, OPTIMIZER, CheckpointWeights, weights_of_checkpoint


def read_own_state(path: Path) -> TrainingState:
    """Return the training state of a checkpoint, of a run (its newest checkpoint) or of a folder of imported weights.

    Raises CheckpointError if it is damaged, has adapters, or is of another optimizer than AdamW.
    """
    saved = published(path / CHECKPOINTS)
    weights = weights_of_checkpoint(saved[-1] if saved else path)
    manifest, folder = weights.manifest, weights.path
    if weights.spec.lora is not None:
        raise CheckpointError(f"{folder} has adapters, which no other format has; export it with --merge first")
    state = TrainingState(format="shardwright", weights=weights)
    kinds = {name.removeprefix(OPTIMIZER).split("/")[0] for name in manifest.tensors if name.startswith(OPTIMIZER)}
    if not kinds:
        return state
    config, step = load_kept(folder), manifest.progress.step
    if config.optimizer.name != "adamw":
        raise CheckpointError(f"{folder} is of optimizer.name={config.optimizer.name!r}; supported: 'adamw'")
    moments = {
        kind: CheckpointWeights(folder, manifest, weights.spec, f"{OPTIMIZER}{kind}/") for kind in (*MOMENTS, STEP)
    }
    counters = moments.pop(STEP)
    if other := {count for name in counters.shapes if (count := int(counters.read(name, (), ()))) != step}:
        raise CheckpointError(
            f"{folder}: AdamW has counted {', '.join(map(str, sorted(other)))} updates after {step} steps, because "
            f"steps were left out; only a state with one number of steps is converted"
        )
    left_out = {
        "compression": "the state of compressed gradients",
        "average": "the averages of the weights",
        "loss_scale": "the scale of an fp16 run",
        "spikes": "the recent losses and norms",
    }
    present = {
        "compression": any(name.startswith("compression/") for name in manifest.tensors),
        "average": any(name.startswith(AVERAGE) for name in manifest.tensors),
        "loss_scale": manifest.loss_scale is not None,
        "spikes": manifest.spikes is not None,
    }
    return replace(
        state,
        moments=moments,
        settings=settings_of_run(config, step),
        step=step,
        tokens=manifest.progress.samples * config.batch.schedule.longest.seq_len,
        samples=manifest.progress.samples,
        left_out={name: reason for name, reason in left_out.items() if present[name]},
    )


def write_own_state(state: TrainingState, out: Path, config: RunConfig) -> list[str]:
    """Write a training state as a checkpoint of the run `config`, with one block of rows in memory at a time. Return
    remarks. Raises CheckpointError with every reason why the run cannot continue from it."""
    assert state.step is not None, "a state without an optimizer is written as weights"
    if problems := list(_misfits(state, config)):
        raise CheckpointError(*(f"{state.weights.path}: {problem}" for problem in shortened(problems, 8)))
    samples, remarks = _samples(state, config)
    tensors = {MODEL: state.weights} | {f"{OPTIMIZER}{kind}/": weights for kind, weights in state.moments.items()}
    pieces = {
        piece: (prefix, name)
        for prefix, weights in tensors.items()
        for name, shape in sorted(weights.shapes.items())
        for piece in row_blocks(prefix + name, weights.dtypes[name], shape)
    }
    for name in trained_parameters(state.spec):
        key = f"{OPTIMIZER}{STEP}/{name}"
        pieces[TensorPiece(key, (), TensorToWrite(key, "float32", ()))] = (STEP, name)

    def take(piece: TensorPiece) -> Tensor:
        prefix, name = pieces[piece]
        if prefix == STEP:
            return torch.tensor(float(state.step or 0))
        return tensors[prefix].read(name, piece.offsets, piece.entry.shape)

    files = list(in_groups(list(pieces), lambda piece: piece.entry.n_bytes, FILE_BYTES))
    records = [record for number, inside in enumerate(files) for record in write_shards(out, number, inside, take)]
    wholes = {
        f"{prefix}{name}": (shape, weights.dtypes[name])
        for prefix, weights in tensors.items()
        for name, shape in weights.shapes.items()
    }
    wholes |= {piece.name: ((), "float32") for piece, (prefix, _) in pieces.items() if prefix == STEP}
    text = kept_run_file(config)
    (out / RUN_FILE).write_text(text, encoding="utf-8")
    sources = Sources(config)
    progress = TrainingProgress(state.step, samples, config.seed)
    stages = [stage for stage in sources.order(progress).stages if stage.from_step < state.step]
    CheckpointManifest(
        progress=progress,
        model=spec_as_json(state.spec),
        data=sources.described(stages),
        world_size=1,
        tensors=tensor_records(wholes, records),
        files={RUN_FILE: sha256_of_text(text)},
    ).write(out)
    return remarks


def other_model(state: TrainingState, spec: ModelSpec) -> Iterator[str]:
    """Yield the fields in which the model of a run file differs from the model of a training state."""
    for key, theirs, ours in differences(state.spec, spec):
        yield f"it is of another model: {key}={theirs!r}, and the run file has {ours!r}"


def _misfits(state: TrainingState, config: RunConfig) -> Iterator[str]:
    """Yield why a run cannot continue from a training state, each with the key of the run file to set."""
    spec, section = config.spec(), config.optimizer
    if spec.lora is not None:
        yield f"it has no adapters, and the run file has lora.rank={spec.lora.rank}; leave [lora] out"
        return
    yield from other_model(state, spec)
    if config.average.kind != "none":
        yield f"it has no average of the weights, and the run file has average.kind={config.average.kind!r}; set 'none'"
    if section.name != "adamw":
        yield f"its optimizer is AdamW, and the run file has optimizer.name={section.name!r}; set it to 'adamw'"
        return
    if missing := sorted(rows(spec).keys() - state.weights.shapes.keys()):
        yield f"it has no {missing[0]}, which a run of this model continues from"
    dtype = name_of(torch.promote_types(DTYPES[config.precision.compute], torch.float32))
    moment_dtype = "bfloat16" if section.state_dtype == "bf16" else dtype
    for what, tensors, expected in (
        ("the weights are", state.weights, dtype),
        *((f"{kind} is", moments, moment_dtype) for kind, moments in state.moments.items()),
    ):
        if other := sorted(set(tensors.dtypes.values()) - {expected}):
            keys = f"precision.compute={config.precision.compute!r}, optimizer.state_dtype={section.state_dtype!r}"
            yield f"{what} {', '.join(other)}, and the run file ({keys}) makes it {expected}"
    if state.step is None or not state.settings:
        return
    of_run = settings_of_run(config, state.step)
    first = next(iter(state.settings.values()))
    for key, theirs, ours in (
        ("beta1", first.betas[0], section.options["beta1"]),
        ("beta2", first.betas[1], section.options["beta2"]),
    ):
        if theirs != ours:
            yield f"AdamW has {key}={theirs:g} there, and the run file has {ours:g}; set optimizer.{key}={theirs!r}"
    of_rows = [(name, row_of(spec, name), given) for name, given in state.settings.items()]
    # Factors of muP are divided out of the values to set, so equality is up to rounding.
    by_eps = {_rounded(given.eps / row.eps_factor): name for name, row, given in reversed(of_rows)}
    other_eps = [name for name in by_eps.values() if not _equal(state.settings[name].eps, of_run[name].eps)]
    if len(by_eps) > 1 and other_eps:
        yield (
            f"AdamW has {_eps_in_words(state.settings, by_eps.values())} there, and the run file has "
            f"{_eps_in_words(of_run, by_eps.values())}; no optimizer.eps makes these with this model.mup"
        )
    elif other_eps:
        ((eps, name),) = by_eps.items()
        yield (
            f"AdamW has {_eps_in_words(state.settings, [name])} there, and the run file has "
            f"{_eps_in_words(of_run, [name])}; set optimizer.eps={eps!r}"
        )
    kinds = {
        row.kind: (name, row, given)
        for name, row, given in of_rows
        if not _equal(given.weight_decay, of_run[name].weight_decay)
    }
    for kind, (name, row, kept) in kinds.items():
        yield (
            f"weight decay of {name} is {kept.weight_decay:g} there, and {of_run[name].weight_decay:g} in the run; set "
            f"optimizer.weight_decay_by_kind.{kind}={_rounded(kept.weight_decay / row.decay_factor)!r}"
        )


def _equal(one: float, other: float) -> bool:
    return math.isclose(one, other, rel_tol=1e-9)


def _rounded(value: float) -> float:
    return float(f"{value:.12g}")


def _eps_in_words(settings: Mapping[str, AdamWSettings], names: Iterable[str]) -> str:
    """Return the eps of some parameters in words."""
    return " and ".join(f"eps={settings[name].eps:g} for {name}" for name in names)


def _samples(state: TrainingState, config: RunConfig) -> tuple[int, list[str]]:
    """Return the samples that the run has trained on, and remarks on the positions that the run file determines."""
    assert state.step is not None
    remarks, schedule = [], config.batch.schedule
    samples, tokens = schedule.samples(0, state.step), schedule.tokens(state.step)
    batches = ", then ".join(f"{stage.global_batch} x {stage.seq_len}" for stage, _ in schedule.parts(0, state.step))
    if state.samples is not None and state.tokens is None and state.samples != samples:
        raise CheckpointError(
            f"{state.weights.path} was trained on {state.samples:,} samples in {state.step:,} steps, and the run file "
            f"makes {samples:,}; set batch.global_batch as it was"
        )
    if state.tokens is not None and state.tokens != tokens:
        raise CheckpointError(
            f"{state.weights.path} was trained on {state.tokens:,} tokens in {state.step:,} steps, and {batches} "
            f"tokens a step in the run file make {tokens:,}; set batch.global_batch and batch.seq_len as they were"
        )
    remarks.append(f"the run continues with sample {samples:,} of its own order, after {state.step:,} steps")
    of_run = settings_of_run(config, state.step)
    rates = {
        (given.lr, of_run[name].lr)
        for name, given in state.settings.items()
        if not math.isclose(given.lr, of_run[name].lr, rel_tol=1e-6)
    }
    for theirs, ours in sorted(rates)[:1]:
        remarks.append(
            f"the learning rate of the next step is {ours:.6g} by the run file and {theirs:.6g} in "
            f"{state.weights.path}; see optimizer.lr, lr_schedule and steps"
        )
    return samples, remarks
