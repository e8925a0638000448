"""The schema of the JSON files of a folder of `transformers`, checked before anything is used; no torch."""

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from shardwright.system.errors import ConfigError, DamagedError, InputError
from shardwright.system.files import parse_json, read_bytes, reason
from shardwright.system.units import MiB

LONGEST_JSON = 32 * MiB
"""The longest JSON file or header that is read. DeepSeek-V3's index of 92,000 tensors has 9 MB."""
MOST_SHOWN = 60
"""Characters of a value that an error repeats."""
Count = Annotated[int, Field(ge=0, lt=2**63)]
TokenId = int | list[int] | None
Dtype = (
    Literal["auto", "float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2", "int8", "uint8"] | None
)
"""The type in which the weights were saved. The files say it too, so it is checked and not used."""


class Rope(BaseModel):
    """`rope_parameters` or `rope_scaling`. Other keys are kept, for `rope.read_rope` to refuse."""

    model_config = ConfigDict(strict=True, extra="allow")
    rope_type: str | None = None
    type: str | None = None
    rope_theta: float | None = Field(None, gt=0)
    partial_rotary_factor: float | None = None
    factor: float | None = None
    low_freq_factor: float | None = None
    high_freq_factor: float | None = None
    original_max_position_embeddings: int | None = Field(None, ge=1)
    beta_fast: float | None = None
    beta_slow: float | None = None
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool | None = None
    full_attention: "Rope | None" = None
    sliding_attention: "Rope | None" = None
    short_factor: list[float] | None = None
    long_factor: list[float] | None = None


class GenerationFile(BaseModel):
    """The keys of generation_config.json that are read."""

    model_config = ConfigDict(strict=True, extra="allow")
    bos_token_id: TokenId = None
    eos_token_id: TokenId = None
    pad_token_id: TokenId = None


class ConfigFile(GenerationFile):
    """The keys of config.json that have one type in every architecture; `Architecture` checks sizes."""

    model_type: str
    torch_dtype: Dtype = None
    dtype: Dtype = None
    architectures: list[str] | None = None
    quantization_config: dict[str, Any] | None = None
    rope_parameters: Rope | None = None
    rope_scaling: Rope | None = None
    rope_theta: float | None = Field(None, gt=0)
    partial_rotary_factor: float | None = None
    max_position_embeddings: int | None = Field(None, ge=1)
    original_max_position_embeddings: int | None = Field(None, ge=1)
    layer_types: list[str] | None = None
    query_pre_attn_scalar: float | None = Field(None, gt=0)
    rope_local_base_freq: float | None = Field(None, gt=0)
    sliding_window_pattern: int | None = Field(None, ge=1)
    logit_scale: float | None = Field(None, gt=0)
    max_window_layers: int | None = Field(None, ge=0)
    full_attention_interval: int | None = Field(None, ge=1)
    no_rope_layers: list[int] | None = None
    moe_layers: list[int] | None = None
    attention_chunk_size: int | None = None
    attn_scale: float | None = Field(None, ge=0)
    floor_scale: int | None = None
    interleave_moe_layer_step: int | None = Field(None, ge=1)
    no_rope_layer_interval: int | None = None
    text_config: "ConfigFile | None" = None


class IndexFile(BaseModel):
    """model.safetensors.index.json."""

    model_config = ConfigDict(strict=True, extra="allow")
    weight_map: dict[str, str]


class HeaderEntry(BaseModel):
    """A tensor in the header of a safetensors file."""

    model_config = ConfigDict(strict=True, extra="forbid")
    dtype: str
    shape: Annotated[tuple[Count, ...], Field(strict=False)]
    data_offsets: Annotated[tuple[Count, Count], Field(strict=False)]

    @property
    def n_elements(self) -> int:
        return math.prod(self.shape)


HEADER = TypeAdapter(dict[str, HeaderEntry])


def read_object(path: Path, form: type[BaseModel], error: type[InputError] = ConfigError) -> dict[str, Any]:
    """Return the object in a JSON file, whose keys have the types of `form` if `form` names them.

    Raises `error` with every key of another type, DamagedError for a file that is not JSON or has a number that is not
    finite, and OSError.
    """
    try:
        table = parse_json(read_bytes(path, LONGEST_JSON), finite=True)
    except ValueError as problem:
        raise DamagedError(f"{path} is damaged: {reason(problem)}") from None
    if not isinstance(table, dict):
        raise error(f"{path} holds no object of keys and values")
    try:
        form.model_validate(table)
    except ValidationError as problem:
        raise error(*dict.fromkeys(f"{path}: {sentence}" for sentence in problems_of(problem, table))) from None
    return table


def problems_of(error: ValidationError, table: dict[str, Any]) -> Iterator[str]:
    """Yield one sentence for each key that pydantic refuses, named up to the first existing one."""
    for entry in error.errors():
        key = ".".join(str(part) for part in entry["loc"] if isinstance(part, str) and part not in ("int", "list[int]"))
        if entry["type"] == "missing":
            yield f"{key} is missing"
        else:
            given = repr(entry["input"])
            given = given if len(given) <= MOST_SHOWN else f"{given[:MOST_SHOWN]}..."
            yield f"{key}={given}: {entry['msg'][0].lower()}{entry['msg'][1:]}"
