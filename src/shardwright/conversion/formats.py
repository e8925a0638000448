"""The table of formats of training checkpoints, a reader and a writer for each, and the conversion between them."""

import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from shardwright.config import RunConfig
from shardwright.config import load as load_run_file
from shardwright.config.sections import spec_of_folder
from shardwright.conversion.dcp import METADATA
from shardwright.conversion.dcp_state import read_dcp_state, state_of_folder, write_dcp_state
from shardwright.conversion.deepspeed import DeepSpeedFolder, step_folder, write_universal_state
from shardwright.conversion.megatron import MegatronFolder
from shardwright.conversion.megatron import step_folder as megatron_step_folder
from shardwright.conversion.megatron_writer import write_megatron_state
from shardwright.conversion.names import MEGATRON, TORCHTITAN, TRANSFORMERS, named_tensors_of
from shardwright.conversion.own import other_model, read_own_state, write_own_state
from shardwright.conversion.prove import compare
from shardwright.conversion.state import TrainingState
from shardwright.hugging_face.files import CONFIG, is_folder_of_transformers
from shardwright.hugging_face.reader import open_weights as open_folder_of_transformers
from shardwright.model.presets import resolve
from shardwright.model.spec import ModelSpec
from shardwright.runs.folder import CHECKPOINTS
from shardwright.system.errors import CheckpointError, InputError, nearest
from shardwright.system.files import new_folder, publish_folder
from shardwright.training.checkpoint.manifest import FILE_NAME
from shardwright.training.exporting import export
from shardwright.training.importing import is_free, write_weights_folder
from shardwright.training.weights import by_reason

DEEPSPEED = "deepspeed-universal"


@dataclass(frozen=True)
class CheckpointFormat:
    """A format. `about`: one line for the help. `is_here`: whether a folder has it. `read`: (folder, model, or None if
    the user names none) -> state. `write`: (state, new folder, run file or None) -> remarks."""

    about: str
    is_here: Callable[[Path], bool]
    read: Callable[[Path, ModelSpec | None], TrainingState]
    write: Callable[[TrainingState, Path, RunConfig | None], list[str]]


@dataclass(frozen=True)
class ConversionResult:
    """The state that was read, the format and folder that were written, and remarks for the user."""

    state: TrainingState
    to: str
    out: Path
    remarks: tuple[str, ...]


def convert(
    source: str | Path,
    out: str | Path,
    to: str,
    *,
    model: str | None = None,
    run: str | Path | None = None,
    prove: bool = False,
) -> ConversionResult:
    """Write the checkpoint `source` in another format to the new folder `out`, which appears when it is complete.

    `to`: a format of `FORMATS`. `model`: a preset, or a folder with a config.json, for a source that does not describe
    its model. `run`: the run file that continues, for `to="shardwright"`. In memory are the largest tensor, up to four
    copies of it while it is renamed and written, and the largest shard of the source. `prove`: compare the computations
    of both sides before the folder gets its name (`prove.compare`). Raises InputError with every reason if the source
    is damaged or incomplete, or if the target has no place for it, and ProofError if the computations differ.
    """
    if to not in FORMATS:
        raise InputError(f"--to {to}: {nearest(to, FORMATS)}")
    config = None if run is None else load_run_file(run)
    is_free(Path(out))
    state = read_state(source, model, config)
    fresh = Path(out).with_name(f"{Path(out).name}.unproven-{os.getpid()}") if prove else Path(out)
    try:
        remarks = FORMATS[to].write(state, fresh, config)
        if prove:
            remarks += compare(state, read_state(fresh, model, config))
            publish_folder(fresh, Path(out), Path(out).with_name(f"{Path(out).name}.replaced-{os.getpid()}"))
    finally:
        if prove:
            shutil.rmtree(fresh, ignore_errors=True)
    remarks += [f"left out: {line}" for line in by_reason(state.left_out)]
    return ConversionResult(state, to, Path(out), tuple(remarks))


def read_state(source: str | Path, model: str | None = None, config: RunConfig | None = None) -> TrainingState:
    """Return the training state of a checkpoint of any format. `model`, `config`: as in `convert`."""
    path = Path(source)
    if not path.is_dir():
        raise CheckpointError(f"{path}: there is no such folder; give one of: {_SUPPORTED}")
    spec = _spec_of(model) if model is not None else None if config is None else config.spec()
    for form in FORMATS.values():
        if form.is_here(path):
            return form.read(path, spec)
    steps = sorted(below.parent.name for below in path.glob(f"*/{METADATA}"))
    inside = f"; it has {', '.join(steps)}: name one of these folders" if steps else ""
    raise CheckpointError(f"{path} has no checkpoint of a supported format{inside}; supported: {_SUPPORTED}")


def _spec_of(model: str) -> ModelSpec:
    path = Path(model)
    if path.name == CONFIG:
        path = path.parent
    return spec_of_folder(path) if path.is_dir() else resolve(model)


def _reader_with_model(
    read: Callable[[Path, ModelSpec], TrainingState],
) -> Callable[[Path, ModelSpec | None], TrainingState]:
    """Return the reader of a format whose files do not describe the model."""

    def read_with_model(path: Path, spec: ModelSpec | None) -> TrainingState:
        if spec is None and not (path / CONFIG).is_file():
            raise InputError(
                f"{path} has no sizes of its model; name it with --model: a preset such as llama-3.1-8b, or the folder "
                f"of its {CONFIG}"
            )
        return read(path, spec or spec_of_folder(path))

    return read_with_model


def _read_deepspeed(path: Path, spec: ModelSpec) -> TrainingState:
    folder = DeepSpeedFolder(step_folder(path) or path)
    state = state_of_folder(folder, spec, DEEPSPEED)
    return replace(state, left_out={**state.left_out, **folder.remarks})


def _read_megatron(path: Path, spec: ModelSpec) -> TrainingState:
    named_tensors_of(MEGATRON, spec)  # raises ConfigError if its names are not known
    folder = MegatronFolder(megatron_step_folder(path) or path, spec)
    state = state_of_folder(folder, spec, MEGATRON, (MEGATRON,))
    return replace(state, left_out={**state.left_out, **folder.remarks})


def _write_megatron(state: TrainingState, out: Path, config: RunConfig | None) -> list[str]:
    with new_folder(out, is_free, CheckpointError) as fresh:
        return write_megatron_state(state, fresh)


def _write_deepspeed(state: TrainingState, out: Path, config: RunConfig | None) -> list[str]:
    with new_folder(out, is_free, CheckpointError) as fresh:
        return write_universal_state(state, fresh)


def _write_dcp(naming: str) -> Callable[[TrainingState, Path, RunConfig | None], list[str]]:
    def write(state: TrainingState, out: Path, config: RunConfig | None) -> list[str]:
        with new_folder(out, is_free, CheckpointError) as fresh:
            write_dcp_state(state, fresh, naming)
        if naming == TORCHTITAN and state.step is not None:
            return [
                "torchtitan starts its data from the first sample again: --checkpoint.exclude_from_loading dataloader"
            ]
        return []

    return write


def _write_own(state: TrainingState, out: Path, config: RunConfig | None) -> list[str]:
    if state.step is None:
        if config and (problems := [*other_model(state, replace(config.spec(), lora=None))]):
            raise CheckpointError(*(f"{state.weights.path}: {problem}" for problem in problems))
        write_weights_folder(state.weights, state.weights.path, out)
        return []
    if config is None:
        raise InputError(
            f"{state.weights.path} has the optimizer states of step {state.step:,}; --run RUN.toml names the run that "
            f"continues from them"
        )
    with new_folder(out, is_free, CheckpointError) as fresh:
        return write_own_state(state, fresh, config)


def _write_transformers(state: TrainingState, out: Path, config: RunConfig | None) -> list[str]:
    remarks = [] if state.step is None else ["left out: the optimizer (a folder of transformers has no place for it)"]
    return [*export(state.weights, out).remarks, *remarks]


FORMATS: Mapping[str, CheckpointFormat] = {
    "shardwright": CheckpointFormat(
        "a checkpoint that `train` continues from; with --run",
        lambda path: (path / FILE_NAME).is_file() or (path / CHECKPOINTS).is_dir(),
        lambda path, spec: read_own_state(path),
        _write_own,
    ),
    MEGATRON: CheckpointFormat(
        "a checkpoint of Megatron in its format torch_dist",
        lambda path: megatron_step_folder(path) is not None,
        _reader_with_model(_read_megatron),
        _write_megatron,
    ),
    TORCHTITAN: CheckpointFormat(
        "a distributed checkpoint (DCP) with torchtitan's names, Llama 3",
        lambda path: (path / METADATA).is_file() or any(path.glob("*.distcp")),
        _reader_with_model(read_dcp_state),
        _write_dcp(TORCHTITAN),
    ),
    "dcp": CheckpointFormat(
        "a distributed checkpoint of PyTorch with the names of transformers",
        lambda path: False,  # `torchtitan` reads every distributed checkpoint
        _reader_with_model(read_dcp_state),
        _write_dcp(TRANSFORMERS),
    ),
    DEEPSPEED: CheckpointFormat(
        "a universal checkpoint of DeepSpeed; checkpoints of its ZeRO-1, 2 and 3 are read too",
        lambda path: step_folder(path) is not None,
        _reader_with_model(_read_deepspeed),
        _write_deepspeed,
    ),
    "hf": CheckpointFormat(
        "a folder of transformers, weights only",
        is_folder_of_transformers,
        lambda path, spec: TrainingState(format="hf", weights=open_folder_of_transformers(path), naming=TRANSFORMERS),
        _write_transformers,
    ),
}
"""Name in `--to` -> format. A folder is read as the first that it has."""
_SUPPORTED = "; ".join(f"{name} ({form.about})" for name, form in FORMATS.items())
