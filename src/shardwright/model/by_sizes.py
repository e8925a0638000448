"""Builds a decoder from a few sizes, for
`plan --model n_layers=32,d_model=4096,n_heads=32,d_ffn=11008,vocab_size=32000`, and its adapters, for
`plan --lora rank=16`; no torch."""

from dataclasses import MISSING, Field, fields, replace
from typing import Any, get_args, get_origin

from shardwright.model.lora_sizes import LoraSpec
from shardwright.model.saved import TABLES
from shardwright.model.spec import ModelSpec
from shardwright.system.errors import ConfigError, nearest

NEEDED = ("n_layers", "d_model", "n_heads", "d_ffn", "vocab_size")


def _keys() -> dict[str, Field[Any]]:
    """Return every key with a single value; keys of a table have its name as prefix."""
    keys = {key.name: key for key in fields(ModelSpec) if key.name not in (*TABLES, "rope_scaling", "lora")}
    for table, spec in TABLES.items():
        keys |= {f"{table}.{key.name}": key for key in fields(spec)}
    return {name: key for name, key in keys.items() if get_origin(key.type) is not tuple}


def spec_of_sizes(text: str, seq_len: int) -> ModelSpec:
    """Return a model from `key=value` pairs, separated by commas, with the keys of [model] in a run file.

    Missing sizes: n_kv_heads is n_heads, head_dim is d_model / n_heads (with latent attention its v_dim), max_seq_len
    is `seq_len`, d_ffn of a mixture is its experts' d_ffn, and other keys, except `NEEDED`, have their defaults.
    Nothing comes from a preset.

    Raises ConfigError with every problem at once.
    """
    known, values, problems = _keys(), dict[str, Any](), list[str]()
    _read_pairs(text, "--model", "size", known, values, problems)
    needed = [*NEEDED, *(f"{table}.{name}" for table in TABLES for name in _needed_of(table, values))]
    for key in needed:
        if key not in values and not (key == "d_ffn" and "moe.d_ffn" in values):
            help = known[key].metadata["help"]
            problems.append(f"--model: {key} is missing; it is: {help[0].lower()}{help[1:].rstrip('.')}")
    if problems:
        raise ConfigError(*problems)
    spec = ModelSpec(**_filled(values, seq_len))
    if problems := spec.problems():
        raise ConfigError(*(f"--model: {problem}" for problem in problems))
    return spec


def sizes_of_spec(spec: ModelSpec) -> str:
    """Return the text that `spec_of_sizes` reads as this model; the scaling of rotary embeddings, which changes no
    size, is left out. Raises ConfigError for a model that single values do not describe."""
    pairs = []
    for name, key in _keys().items():
        table, _, inner = name.rpartition(".")
        holder = getattr(spec, table) if table else spec
        if holder is not None and ((value := getattr(holder, inner)) != key.default or name in NEEDED):
            pairs.append(f"{name}={str(value).lower() if isinstance(value, bool) else value}")
    text = ",".join(pairs)
    try:
        same = spec_of_sizes(text, spec.max_seq_len) == replace(spec, rope_scaling=None, lora=None)
    except ConfigError:  # a key that goes with a list, which is left out
        same = False
    if not same:
        raise ConfigError("the model has sizes that differ between layers; plan --model reads its config.json")
    return text


def lora_of_text(text: str) -> LoraSpec:
    """Return the adapters of `key=value` pairs, separated by commas, with the keys of [lora] in a run file, such as
    `rank=16,targets=q+v`. Raises ConfigError with every problem at once, without the rules of a model."""
    values, problems = dict[str, Any](), list[str]()
    _read_pairs(text, "--lora", "key", {key.name: key for key in fields(LoraSpec)}, values, problems)
    if not problems and "rank" not in values:
        problems.append(f"--lora {text}: rank is missing; give it, such as --lora rank=16")
    if problems:
        raise ConfigError(*problems)
    return LoraSpec(**values)


def _read_pairs(
    text: str, option: str, what: str, known: dict[str, Field[Any]], values: dict[str, Any], problems: list[str]
) -> None:
    """Add the values of `key=value` pairs, separated by commas, to `values`, and the problems of others to `problems`.
    `option`, `what`: for the messages, the option of the command line and the word for a key."""
    for pair in filter(None, map(str.strip, text.split(","))):
        key, _, value = (part.strip() for part in pair.partition("="))
        if key not in known:
            problems.append(f"{option} {pair}: no such {what}; {nearest(key, known)}")
        elif key in values:
            problems.append(f"{option} {pair}: given twice; leave one out")
        else:
            try:
                values[key] = _read(value, known[key].type)
            except ValueError as error:
                problems.append(f"{option} {pair}: {error}")


def _read(text: str, kind: Any) -> Any:
    """Return a value of a type, or one of its words. Raises ValueError with the values that are valid."""
    if kind == tuple[str, ...]:
        return tuple(filter(None, text.split("+")))
    if kind is bool:
        if text not in ("true", "false"):
            raise ValueError("true or false is needed")
        return text == "true"
    if kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            raise ValueError("a whole number is needed" if kind is int else "a number is needed") from None
    if words := get_args(kind):
        if text not in words:
            raise ValueError(nearest(text, words))
        return text
    return text


def _needed_of(table: str, values: dict[str, Any]) -> list[str]:
    """Return the sizes that a table needs, if one of its keys is given."""
    if not any(key.startswith(f"{table}.") for key in values):
        return []
    return [key.name for key in fields(TABLES[table]) if key.default is MISSING]


def _filled(values: dict[str, Any], seq_len: int) -> dict[str, Any]:
    """Return the arguments of a spec, including sizes that follow from others."""
    sizes = {key: value for key, value in values.items() if "." not in key}
    for table, spec in TABLES.items():
        inner = {key.partition(".")[2]: value for key, value in values.items() if key.startswith(f"{table}.")}
        if inner:
            sizes[table] = spec(**inner)
    sizes.setdefault("d_ffn", values.get("moe.d_ffn"))
    sizes.setdefault("n_kv_heads", sizes["n_heads"])
    sizes.setdefault("max_seq_len", seq_len)
    if "head_dim" not in sizes:
        latent, width, heads = sizes.get("latent_attention"), sizes["d_model"], sizes["n_heads"]
        if latent is None and (heads < 1 or width % heads):
            raise ConfigError(
                f"--model: head_dim is missing, and d_model / n_heads = {width} / {heads} is not whole; give head_dim"
            )
        sizes["head_dim"] = latent.v_dim if latent is not None else width // heads
    return sizes
