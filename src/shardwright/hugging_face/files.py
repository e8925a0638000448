"""A folder of `transformers`: its config.json, and the places of tensors in its safetensors files; no torch."""

import functools
import io
import json
import math
import os
import struct
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError

from shardwright.hugging_face import (
    cohere,
    deepseek,
    gemma,
    glm4,
    gpt2,
    gpt_oss,
    granite,
    llama,
    llama4,
    mistral,
    multimodal,
    olmo2,
    phi3,
    qwen,
    qwen3_next,
    qwen_moe,
    smollm3,
    starcoder2,
)
from shardwright.hugging_face.architecture import ARCHITECTURES, Architecture, find
from shardwright.hugging_face.schema import (
    HEADER,
    LONGEST_JSON,
    ConfigFile,
    GenerationFile,
    IndexFile,
    problems_of,
    read_object,
)
from shardwright.model.spec import ModelSpec
from shardwright.system.errors import CheckpointError, ConfigError, DamagedError, InputError
from shardwright.system.files import find_inside, inside, open_regular, parse_json
from shardwright.system.units import format_bytes

CONFIG, INDEX, WHOLE = "config.json", "model.safetensors.index.json", "model.safetensors"
DTYPES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}
"""Type in a safetensors file -> its name in torch, for the types that are read."""
MXFP4 = ("_blocks", "_scales")
"""Ends of the names of the two tensors, of bytes, that a file has for one quantised in mxfp4."""
_ITEM_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "U8": 1}
_COMPARED_AT_ONCE = 2**22
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
    "chat_template.jinja",
)
"""Files of a tokenizer, which are copied."""
GENERATION = "generation_config.json"
ADAPTER = "adapter_config.json"
"""The settings of an adapter of peft. With peft, `transformers` adds the adapter in a folder to the weights."""
TOKEN_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")
NO_PADDING = ("pad_token_id", -1)
"""The key and value that mean "no padding token" in configurations of the first Llama."""
WITHOUT_SIZE = (
    "quantization_config",
    "rms_norm_eps",
    "layer_norm_epsilon",
    "scoring_func",
    "topk_method",
    "rope_interleave",
)
"""Keys of a config.json that affect neither the sizes of a model nor its cost."""
LENGTH = struct.Struct("<Q")
_BUILT_IN = (
    llama,
    mistral,
    qwen,
    gpt2,
    qwen_moe,
    qwen3_next,
    deepseek,
    olmo2,
    granite,
    phi3,
    smollm3,
    gemma,
    glm4,
    starcoder2,
    gpt_oss,
    cohere,
    llama4,
    multimodal,
)
"""Modules of the built-in architectures, whose imports register them. A model is exported as the first that fits."""
for _module in _BUILT_IN:
    for _architecture in [value for value in vars(_module).values() if isinstance(value, Architecture)]:
        ARCHITECTURES[_architecture.model_type] = ARCHITECTURES.pop(_architecture.model_type)


@dataclass(frozen=True)
class TensorInFile:
    """A tensor in a file; `dtype` by torch's name, `begin` the byte in the file where it starts."""

    file: Path
    dtype: str
    shape: tuple[int, ...]
    begin: int


@dataclass(frozen=True)
class ModelFolder:
    """A folder of `transformers` and the model in it."""

    path: Path
    config: dict[str, Any]
    architecture: Architecture
    spec: ModelSpec
    untied: bool = False
    """Whether config.json ties the head to the embedding, but the files have a head with other values."""

    @property
    def tokenizer(self) -> Path | None:
        """Its tokenizer.json, if there is one."""
        return find_inside(self.path, TOKENIZER_FILES[0])


def is_folder_of_transformers(path: Path) -> bool:
    """Return whether a folder has a config.json."""
    return (path / CONFIG).is_file()


def read_folder(path: Path) -> ModelFolder:
    """Return the model of a folder, from its config.json; with multi-token prediction modules only if their weights
    exist, because `transformers` saves none and leaves their number in config.json.

    Raises ConfigError if it is not supported, with every reason.
    """
    config, architecture, spec = _read_config(inside(path, CONFIG))
    if problems := list(_token_id_problems(path, architecture, spec.vocab_size)):
        raise ConfigError(*problems)
    if spec.mtp_modules and not _holds_layer(path, architecture, spec.n_layers):
        spec = replace(spec, mtp_modules=0)
    untied = spec.tied_embedding and _has_own_head(path, architecture)
    return ModelFolder(path, config, architecture, replace(spec, tied_embedding=False) if untied else spec, untied)


def _has_own_head(path: Path, architecture: Architecture) -> bool:
    """Return whether a folder whose config.json ties the head to the embedding has a head with other values.
    `transformers` then keeps both, regardless of config.json."""
    if not _has_weights(path):
        return False
    tensors = tensors_in_files(path)
    head, embedding = (f"{architecture.ends[name]}.weight" for name in ("head", "embedding"))
    one, other = tensors.get(head), tensors.get(architecture.prefix + embedding, tensors.get(embedding))
    if one is None or other is None:
        return False
    return one.shape != other.shape or not equal_values(one, other)  # a head of another shape is refused by its name


def _has_weights(path: Path) -> bool:
    return (path / WHOLE).is_file() or (path / INDEX).is_file()


def read_sizes(file: Path) -> ModelSpec:
    """Return the sizes of the model of a config.json, for a plan: the published type of the weights and keys that
    change no size are ignored. Multi-token prediction modules count as in `read_folder`.

    Raises ConfigError if the model is not supported, with every reason.
    """
    _, architecture, spec = _read_config(file, WITHOUT_SIZE)
    if spec.mtp_modules and not _holds_layer(file.parent, architecture, spec.n_layers):
        spec = replace(spec, mtp_modules=0)
    return spec


def _read_config(file: Path, ignored: tuple[str, ...] = ()) -> tuple[dict[str, Any], Architecture, ModelSpec]:
    config = _object(file, ConfigFile)
    try:
        architecture = find(config)
        return config, architecture, architecture.spec({k: v for k, v in config.items() if k not in ignored})
    except ConfigError as error:
        raise ConfigError(*(f"{file}: {problem}" for problem in error.problems)) from None


def _holds_layer(path: Path, architecture: Architecture, layer: int) -> bool:
    """Return whether a folder has weights, and a layer of that number among them."""
    if not _has_weights(path):
        return False
    begin = architecture.layers.format(layer=layer)
    return any(name.removeprefix(architecture.prefix).startswith(begin) for name in tensors_in_files(path))


def tensors_in_files(path: Path) -> dict[str, TensorInFile]:
    """Return every tensor of a folder by its name, from the headers of its safetensors files: of model.safetensors, or
    otherwise of the files in the index, as `transformers` chooses them. The index's entries of single tensors are not
    read, because an older index may name tensors that no longer exist.

    Raises CheckpointError if there is none, and DamagedError for a shard that is missing or shorter than its header
    says.
    """
    if (path / WHOLE).is_file():
        return read_header(inside(path, WHOLE, DamagedError))
    if (path / INDEX).is_file():
        weight_map = _object(inside(path, INDEX, DamagedError), IndexFile, DamagedError)["weight_map"]
        names = sorted(set(weight_map.values()))
        files = [inside(path, name, DamagedError) for name in names]
        if missing := [file.name for file in files if not file.is_file()]:
            raise DamagedError(
                f"{path}: {len(missing)} of the {len(names)} files that {INDEX} names are missing: {_some(missing)}; "
                f"download them again"
            )
        return {key: tensor for file in files for key, tensor in read_header(file).items()}
    pickled = sorted(file.name for file in path.glob("*") if file.suffix in (".bin", ".pt", ".pth", ".ckpt"))
    if pickled:
        raise CheckpointError(
            f"{path} has weights as {_some(pickled)} only, pickle files that can run any code when they are read; only "
            f"safetensors are supported: load and save the model once with transformers, "
            f"save_pretrained(..., safe_serialization=True)"
        )
    raise CheckpointError(f"{path} has no weights: neither {WHOLE} nor {INDEX}")


def read_header(path: Path) -> dict[str, TensorInFile]:
    """Return the tensors of a safetensors file. Raises DamagedError for one that is cut off or of another kind."""
    try:
        with open_regular(path) as file:
            size = os.fstat(file.fileno()).st_size
            (length,) = LENGTH.unpack(file.read(LENGTH.size))
            if length > LONGEST_JSON:
                limit = format_bytes(LONGEST_JSON)
                raise DamagedError(f"{path}: its header has {length:,} bytes, and at most {limit} are read")
            header = parse_json(file.read(length)) if length < size else None
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from None
    except (struct.error, ValueError) as error:
        if isinstance(error, DamagedError):
            raise
        header = None
    if not isinstance(header, dict):
        raise DamagedError(f"{path} is damaged: it does not start with the header of a safetensors file")
    header.pop("__metadata__", None)
    try:
        entries = HEADER.validate_python(header)
    except ValidationError as error:
        raise DamagedError(f"{path} is damaged: in its header {next(problems_of(error, header))}") from None
    begin = LENGTH.size + length
    needed = begin + max((entry.data_offsets[1] for entry in entries.values()), default=0)
    if size != needed:
        raise DamagedError(
            f"{path} is damaged: it has {size:,} bytes, and its header says {needed:,}; download it again"
        )
    bytes_of_mxfp4 = {name for name, entry in entries.items() if entry.dtype == "U8" and name.endswith(MXFP4)}
    if odd := sorted({entry.dtype for name, entry in entries.items() if name not in bytes_of_mxfp4} - DTYPES.keys()):
        raise CheckpointError(
            f"{path} holds tensors of type {_some(odd)}; supported: {', '.join(DTYPES)}; convert quantised weights "
            f"with transformers first"
        )
    for name, entry in entries.items():
        has_bytes, n_bytes = entry.data_offsets[1] - entry.data_offsets[0], entry.n_elements * _ITEM_BYTES[entry.dtype]
        if has_bytes != n_bytes:
            raise DamagedError(f"{path} is damaged: {name} has {has_bytes:,} bytes, and its shape makes {n_bytes:,}")
    return {
        name: TensorInFile(path, DTYPES.get(entry.dtype, "uint8"), entry.shape, begin + entry.data_offsets[0])
        for name, entry in entries.items()
    }


def equal_values(one: TensorInFile, other: TensorInFile) -> bool:
    """Return whether two tensors of the same shape have the same stored values. The result is cached while the files
    do not change."""
    return _equal_values(one, other, *(tensor.file.stat().st_mtime_ns for tensor in (one, other)))


@functools.lru_cache(maxsize=64)
def _equal_values(one: TensorInFile, other: TensorInFile, *changed_ns: int) -> bool:
    import numpy as np

    left = math.prod(one.shape)
    with open_regular(one.file) as a, open_regular(other.file) as b:
        a.seek(one.begin)
        b.seek(other.begin)
        while left:
            n = min(left, _COMPARED_AT_ONCE)
            if not np.array_equal(_values(a, one.dtype, n), _values(b, other.dtype, n)):
                return False
            left -= n
    return True


def _values(file: io.BufferedReader, dtype: str, n: int) -> Any:
    """Return the next n numbers of a file, as an array; bfloat16 is the upper half of float32."""
    import numpy as np

    if dtype != "bfloat16":
        return np.frombuffer(file.read(n * np.dtype(dtype).itemsize), np.dtype(dtype).newbyteorder("<"))
    return (np.frombuffer(file.read(2 * n), "<u2").astype(np.uint32) << 16).view(np.float32)


def _object(path: Path, form: type[BaseModel], error: type[InputError] = ConfigError) -> dict[str, Any]:
    try:
        return read_object(path, form, error)
    except FileNotFoundError:
        raise ConfigError(
            f"{path.parent} is not a folder of transformers: it has no {path.name}; supported architectures: "
            f"{', '.join(ARCHITECTURES)}"
        ) from None
    except OSError as problem:
        raise InputError(f"{path} cannot be read: {problem.strerror}") from None


def _some(names: list[str], n: int = 3) -> str:
    more = f" and {len(names) - n} more" if len(names) > n else ""
    return ", ".join(names[:n]) + more


def shortened(problems: list[str], n: int = 4) -> Iterator[str]:
    """Yield the first problems, and the number of further ones."""
    yield from problems[:n]
    if len(problems) > n:
        yield f"and {len(problems) - n} more"


def _token_id_problems(path: Path, architecture: Architecture, vocab_size: int) -> Iterator[str]:
    """Yield a sentence for each id outside the vocabulary: a text would never end, or the first step would fail."""
    for name in (CONFIG, GENERATION):
        table = _token_id_table(path, name)
        for key in TOKEN_IDS:
            ids = table.get(key)
            for number in ids if isinstance(ids, list) else [ids]:
                if number in (None, architecture.default_token_id) or (key, number) == NO_PADDING:
                    continue
                if not 0 <= number < vocab_size:
                    yield (
                        f"{path / name}: {key}={number} is no token of a vocabulary of {vocab_size} (0 to "
                        f"{vocab_size - 1}); write the id of a token, or null"
                    )


def _token_id_table(path: Path, name: str) -> dict[str, Any]:
    """Return the object in a file that may have token ids; the keys of a `text_config` count where the file itself does
    not have them. Empty without the file."""
    file = find_inside(path, name)
    table = {} if file is None else _object(file, GenerationFile)
    text = table.get("text_config")
    return {**text, **table} if name == CONFIG and isinstance(text, dict) else table


def token_ids(path: Path) -> dict[str, int | list[int]]:
    """Return the existing ids of the tokens that start, end and pad a text, from generation_config.json or otherwise
    config.json."""
    ids: dict[str, int | list[int]] = {}
    for name in (CONFIG, GENERATION):
        table = _token_id_table(path, name)
        ids |= {key: table[key] for key in TOKEN_IDS if table.get(key) is not None and (key, table[key]) != NO_PADDING}
    return ids


def write_token_ids(path: Path, ids: dict[str, int | list[int]]) -> None:
    """Write generation_config.json with the ids, unless there is one."""
    if not (path / GENERATION).is_file():
        (path / GENERATION).write_text(json.dumps(ids, indent=2) + "\n")
