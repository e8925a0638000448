"""shardwright export: weights as a folder of Hugging Face transformers."""

import re
from pathlib import Path

from shardwright.cli.common import AsJson, argument, flag, option, print_answer, reading_verb
from shardwright.system.errors import InputError
from shardwright.system.units import format_bytes

_UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


@reading_verb
def export(
    source: Path = argument(..., "a run (its newest checkpoint), a checkpoint or weights", "RUN_OR_CHECKPOINT"),
    out: Path = option(..., "the new folder that is written", "FOLDER"),
    dtype: str | None = option(None, "bf16, fp16, fp32 or fp64: type of the weights; if not given, as they are"),
    max_shard_size: str = option("5GB", "most bytes of a file, such as 5GB or 500MiB"),
    tokenizer: Path | None = option(None, "take the tokenizer of this folder, and its chat template", "FOLDER"),
    allow_nan: bool = flag("write values that are NaN or infinite, too; without it they are refused"),
    architecture: str | None = option(None, "model_type to write if several fit, such as phi3 or llama", "MODEL_TYPE"),
    average: bool = flag("write the average of the weights that the run made ([average])"),
    adapter: bool = flag("of a run with [lora], write the adapters alone, as peft reads them"),
    merge: bool = flag("of a run with [lora], write the base with the adapters merged into it"),
    json: AsJson = False,
) -> None:
    """Write weights as a folder that transformers loads with AutoModelForCausalLM.from_pretrained.

    The folder has config.json, generation_config.json, the weights as safetensors, the tokenizer, and a model card
    with the facts of the run. From every layout the weights are the same bytes.

    shardwright export runs/debug --out hf/debug --dtype bf16
    """
    if adapter:
        given = {"--dtype": dtype, "--tokenizer": tokenizer, "--merge": merge, "--average": average}
        if others := " and ".join(name for name, value in given.items() if value):
            raise InputError(f"--adapter writes the adapters as they are; leave out {others}")
        _adapter(source, out, architecture, json)
        return
    from shardwright.training.exporting import export as write

    done = write(
        source, out, dtype=dtype, max_shard_bytes=_bytes(max_shard_size), tokenizer=tokenizer, allow_nan=allow_nan,
        architecture=architecture, average=average, merge=merge,
    )  # fmt: skip
    name = done.architecture.class_name
    data = {"out": str(out), "architecture": name, "dtype": done.dtype, "bytes": done.n_bytes}
    line = f"{name}, {done.dtype}, {format_bytes(done.n_bytes)} -> {out}"
    print_answer(json, data | {"remarks": list(done.remarks)}, line, *done.remarks)


def _adapter(source: Path, out: Path, architecture: str | None, json: bool) -> None:
    from shardwright.training.adapters import export_adapter

    n_bytes = export_adapter(source, out, architecture)
    line = f"adapters for peft, {format_bytes(n_bytes)} -> {out}"
    print_answer(json, {"out": str(out), "bytes": n_bytes}, line)


def _bytes(text: str) -> int:
    match = re.fullmatch(r"([0-9]{1,18})\s*([A-Za-z]*)", text.strip())
    if match is None or match[2].upper() not in _UNITS:
        raise InputError(f"--max-shard-size {text}: give a number and a unit, such as 5GB or 500MiB")
    return int(match[1]) * _UNITS[match[2].upper()]
