"""`shardwright import`: convert a folder of `transformers` to a folder of weights in Shardwright's checkpoint format.

OUT/manifest.json             tensors, their shards with a checksum each
OUT/weights-00001.safetensors ...
OUT/model.toml                the section [model] of a run file
OUT/tokenizer.json ...        the files of the tokenizer and generation_config.json, unchanged
"""

from collections import defaultdict
from collections.abc import Callable, Iterator
from functools import partial
from math import prod
from pathlib import Path

from torch import Tensor

from shardwright.config import as_toml, table_of
from shardwright.hugging_face.files import GENERATION, TOKENIZER_FILES, token_ids, write_token_ids
from shardwright.hugging_face.reader import HuggingFaceWeights, open_weights
from shardwright.hugging_face.writer import TensorToWrite
from shardwright.model.spec import ModelSpec
from shardwright.runs.folder import MODEL_FILE
from shardwright.system.errors import CheckpointError, InputError
from shardwright.system.files import LONGEST_TOKENIZER, find_inside, new_folder, read_bytes
from shardwright.system.units import GiB, in_groups
from shardwright.training.checkpoint.manifest import (
    BaseRecord,
    CheckpointManifest,
    ShardRecord,
    TrainingProgress,
    key_of,
    sha256_of_text,
)
from shardwright.training.checkpoint.plan import TensorPiece
from shardwright.training.checkpoint.shards import tensor_records, write_pieces
from shardwright.training.weights import MODEL, Weights, count_not_finite, not_finite_in_words

BLOCK_BYTES = GiB // 4
"""Maximum size of a shard, unless one row is larger: the amount in memory at a time, and the least that a rank
reads."""
FILE_BYTES = 4 * GiB


def import_weights(source: str | Path, out: str | Path) -> HuggingFaceWeights:
    """Write the weights of a folder of `transformers` to the new folder `out`, with one shard in memory at a time.

    `source`: the folder, or the id of a model of the Hugging Face hub, which is downloaded. Raises InputError with all
    problems if the model is unsupported or damaged, if values are not finite, or if `out` exists.
    """
    weights = open_weights(folder_of(str(source)))
    write_weights_folder(weights, source, Path(out))
    return weights


def write_weights_folder(
    weights: Weights,
    source: str | Path,
    out: Path,
    add_tokenizer: Callable[[Path], dict[str, int | list[int]]] | None = None,
    verb: str = "import",
    base: BaseRecord | None = None,
) -> None:
    """Write weights, which come from `source`, to the new folder `out`. Raises as `import_weights`.

    `add_tokenizer`: writes the tokenizer into a folder and returns the ids of the tokens that start and end a text; by
    default the files next to the weights are copied. `verb`: of the command, for a comment in model.toml. `base`: the
    weights that these adapters are for."""
    not_finite: dict[str, int] = defaultdict(int)

    def take(piece: TensorPiece) -> Tensor:
        name = piece.name.removeprefix(MODEL)
        tensor = weights.read(name, piece.offsets, piece.entry.shape)
        not_finite[name] += count_not_finite(tensor)
        return tensor

    with new_folder(out, is_free, CheckpointError) as fresh:
        wholes = {MODEL + name: (shape, weights.dtypes[name]) for name, shape in sorted(weights.shapes.items())}
        pieces = [piece for name, (shape, dtype) in wholes.items() for piece in row_blocks(name, dtype, shape)]
        records: list[tuple[str, ShardRecord]] = []
        for number, inside in enumerate(in_groups(pieces, lambda piece: piece.entry.n_bytes, FILE_BYTES), start=1):
            records += write_pieces(fresh / f"weights-{number:05d}.safetensors", inside, take)
        if problems := [
            f"{not_finite_in_words(source, n, prod(weights.shapes[name]), name)}; the weights are damaged, or were "
            f"saved in a type that does not hold them"
            for name, n in not_finite.items()
            if n
        ]:
            raise InputError(*problems)
        text = f"# written by `shardwright {verb} {source}`\n{_model_section(weights.spec)}"
        (fresh / MODEL_FILE).write_text(text, encoding="utf-8")
        manifest = CheckpointManifest(
            progress=TrainingProgress(step=0, samples=0, seed=0),
            model=table_of(weights.spec),
            data=None,
            world_size=1,
            tensors=tensor_records(wholes, records),
            files={MODEL_FILE: sha256_of_text(text)},
            base=base,
        )
        write_token_ids(fresh, (add_tokenizer or partial(_add_tokenizer, weights.path))(fresh))
        manifest.write(fresh)


def _model_section(spec: ModelSpec) -> str:
    """Return the section [model] of a run file and, for a model with adapters, [lora]."""
    sizes = table_of(spec)
    lora = sizes.pop("lora", {})
    lines = ["[model]", *(f"{key} = {as_toml(value)}" for key, value in sizes.items())]
    lines += ["", "[lora]", *(f"{key} = {as_toml(value)}" for key, value in lora.items())] if lora else []
    return "\n".join(lines) + "\n"


def _add_tokenizer(source: Path, out: Path) -> dict[str, int | list[int]]:
    copy_tokenizer(source, out)
    return token_ids(source)


def copy_tokenizer(source: Path, out: Path) -> list[str]:
    """Copy the existing tokenizer files and generation_config.json. Return their names."""
    files = {name: find_inside(source, name) for name in (*TOKENIZER_FILES, GENERATION)}
    present = {name: path for name, path in files.items() if path is not None}
    for name, path in present.items():
        (out / name).write_bytes(read_bytes(path, LONGEST_TOKENIZER))
    return list(present)


def is_free(out: Path) -> None:
    """Raise CheckpointError if `out` exists."""
    if out.exists():
        raise CheckpointError(f"{out} is there already; remove it, or name another folder")


def row_blocks(name: str, dtype: str, shape: tuple[int, ...]) -> Iterator[TensorPiece]:
    """Yield consecutive rows of a tensor of a checkpoint as pieces of at most `BLOCK_BYTES`, or of one row."""
    whole = TensorToWrite(name, dtype, shape)
    row_bytes = max(1, whole.n_bytes // shape[0])
    rows = max(1, BLOCK_BYTES // row_bytes)
    for begin in range(0, shape[0], rows):
        offsets = (begin,) + (0,) * (len(shape) - 1)
        entry = TensorToWrite(key_of(name, offsets), dtype, (min(rows, shape[0] - begin), *shape[1:]))
        yield TensorPiece(name, offsets, entry)


def folder_of(source: str) -> Path:
    """Return the folder of a model: the given path, or the download folder of the hub model with this id.

    Raises InputError if `source` is neither, or cannot be downloaded.
    """
    if Path(source).exists():
        return Path(source)
    if not (source.count("/") == 1 and all(source.split("/")) and not source.startswith((".", "~"))):
        raise InputError(f"{source}: there is no such folder, and an id of the Hugging Face hub is OWNER/NAME")
    try:
        from huggingface_hub import snapshot_download
    except ImportError:
        raise InputError(
            f"{source} is no folder, and to download it from the Hugging Face hub huggingface_hub is needed: pip "
            f"install huggingface_hub"
        ) from None
    try:
        wanted = ["*.safetensors", "*.safetensors.index.json", "config.json", GENERATION, *TOKENIZER_FILES]
        return Path(snapshot_download(source, allow_patterns=wanted))
    except Exception as error:  # the library and the network code raise many types
        reason = str(error).strip().splitlines() or [type(error).__name__]
        raise InputError(
            f"{source} is no folder here, and cannot be downloaded from the Hugging Face hub ({reason[0]}); give the "
            f"path of a folder, or see that the id, the network and HF_TOKEN are right"
        ) from None


def bytes_of(weights: HuggingFaceWeights) -> int:
    """Return the total size of all parameters in bytes."""
    return sum(TensorToWrite(name, weights.dtypes[name], shape).n_bytes for name, shape in weights.shapes.items())
