"""The registry of supported architectures of `transformers` and their tables; no torch.

To add one: a file like `llama.py` that registers an `Architecture`, and its name in `files.py`.
"""

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from shardwright.hugging_face.rope import read_rope, rope_fraction, write_rope
from shardwright.model.saved import TABLES, differences
from shardwright.model.spec import ModelSpec
from shardwright.system.errors import ConfigError, nearest

Config = dict[str, Any]
"""The content of a config.json."""
_ABSENT = object()
_OUTSIDE_OF_TEXT = ("quantization_config", "tie_word_embeddings")
"""Keys of a model of more than text that are of its text part too."""


@dataclass(frozen=True)
class Stored:
    """The place of Shardwright's parameters in one tensor of a file.

    `name`: in the file; `{expert}` stands for the number of the expert if each has its own tensor. Without it the
    tensor of experts has all of them, as here: (experts, out, in).
    `transposed`: (in, out) in the file, as in GPT-2's Conv1D; (out, in) otherwise.
    `alternating`: row i of parameter p of n stacked ones is row n i + p in the file, as gate and up in gpt-oss; without
    it all rows of the first parameter come first.
    `interleaved`: the rotated elements of a head are paired 2i with 2i + 1 in the file, and i with i + C/2 here. The
    rotated elements are the first `rope_dim` of each head, or in latent attention the parts of the row whose name ends
    with `_rope`. The bias has the same order.
    `by_kv_head`: for stacked queries, keys and values, the rows of a file are, for each kv head, its query heads, its
    key and its value, as in Megatron's linear_qkv.
    `folded`: a vector over all heads is (heads, head_dim) in the file.
    """

    name: str
    transposed: bool = False
    interleaved: bool = False
    alternating: bool = False
    by_kv_head: bool = False
    folded: bool = False


Table = dict[str | tuple[str, ...], str | Stored]


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """An architecture of `transformers` and its model in Shardwright.

    `model_type`, `class_name`: as in config.json.
    `sizes`: field of ModelSpec (`n_layers`, `moe.top_k`) -> key of config.json, or the keys that all have its value; a
    key that starts with `_` is only made by `complete`, and is not written.
    `choices`: field of ModelSpec -> its value for this architecture.
    `fixed`: key of config.json -> the one value that is supported; it is written.
    `complete`: config.json -> config.json with the defaults of `transformers` for keys that are missing or null.
    `ends`, `layer`: our parameter, or the module that has the weight and bias -> its tensor; parameters that are
    stacked along their output dim in one tensor are one key, a tuple. The names of `layer` follow `layers` with the
    number.
    `module`: tensors of a multi-token prediction (MTP) module besides its block, whose tensors are in `layer`, under
    the name of a layer after the last; `copied`: our parameter -> its name there, if files repeat it. Empty: MTP
    modules are not supported.
    `also`: changes of `layer` for some models.
    `rope_fraction`: the fraction of each head that `transformers` rotates if `partial_rotary_factor` is missing; None:
    it rotates whole heads, whatever the key says.
    `null_if_zero`: keys of config.json that are null where they are 0 here.
    `default_token_id`: the id of the tokens that start and end a text if config.json does not give them; `transformers`
    writes it into configurations with a smaller vocabulary, too. None: no id outside the vocabulary is valid.
    `prefix`: start of every name except the head's; a file may leave it out.
    `ignored`: regular expression of names that are left out -> the reason; `{n_layers}` in it stands for the number.
    `problems`: config.json, completed but with its nulls -> its unsupported values, one sentence each.
    `written`: spec -> keys of config.json that follow from several fields; they replace others.
    `quantised`: values of `quantization_config.quant_method` whose weights are read; in bf16.
    `text_defaults`: for a model of more than text, whose `text_config` in config.json is the configuration that the
    fields above describe, the values of keys that are missing there. It is read, and written as its text part alone;
    `model_type` and `class_name` are of the whole.
    """

    model_type: str
    class_name: str
    sizes: Mapping[str, str | tuple[str, ...]]
    choices: Mapping[str, Any]
    fixed: Mapping[str, Any]
    complete: Callable[[Config], Config]
    ends: Table
    layer: Table
    layers: str = "layers.{layer}."
    prefix: str = "model."
    module: Table = field(default_factory=dict)
    copied: Table = field(default_factory=dict)
    also: Callable[[ModelSpec], Table] = lambda spec: {}
    rope_fraction: float | None = None
    null_if_zero: tuple[str, ...] = ()
    default_token_id: int | None = None
    ignored: Mapping[str, str] = field(default_factory=dict)
    problems: Callable[[Config], Iterator[str]] = lambda config: iter(())
    written: Callable[[ModelSpec], Config] = lambda spec: {}
    quantised: tuple[str, ...] = ()
    text_defaults: Mapping[str, Any] | None = None

    def spec(self, given: Config) -> ModelSpec:
        """Return the model of a config.json. Raises ConfigError with every problem at once."""
        if self.text_defaults is not None:
            if not isinstance(given.get("text_config"), dict):
                raise ConfigError(f"text_config is missing, which has the sizes of a {self.model_type}")
            outside: Config = {key: given[key] for key in _OUTSIDE_OF_TEXT if key in given}
            given = {**self.text_defaults, **given["text_config"], **outside}
        stated = {key: value for key, value in given.items() if value is not None}
        # A null differs from a missing key.
        stated |= {key: 0 for key in self.null_if_zero if key in given and given[key] is None}
        if "num_key_value_heads" in given and "num_attention_heads" in stated:
            stated.setdefault("num_key_value_heads", stated["num_attention_heads"])
        if problems := list(self._type_problems(stated)):
            raise ConfigError(*problems, *self._problems(stated))
        config = self.complete(stated)
        problems = [*self._problems(config), *self.problems({**given, **config})]
        values: dict[str, Any] = dict(self.choices)
        for ours, keys in self.sizes.items():
            stated = {key: config[key] for key in _keys(keys) if key in config}
            if not stated:
                problems.append(f"{_keys(keys)[0]} is missing; it is model.{ours} here")
            elif len({str(value) for value in stated.values()}) > 1:
                values_in_words = " and ".join(f"{key}={value!r}" for key, value in stated.items())
                problems.append(f"{values_in_words} differ; only one value for both is supported")
            else:
                values[ours] = next(iter(stated.values()))
        if values.get("positions") == "rope":
            theta, scaling, unsupported = read_rope(config)
            fraction, wrong_fraction = rope_fraction(config, self.rope_fraction)
            problems += [*unsupported, *wrong_fraction]
            values |= {"rope_theta": theta, "rope_scaling": scaling, "rope_fraction": fraction}
        spec = _build(values) if self.sizes.keys() <= values.keys() else None
        problems += [] if spec is None else spec.problems()
        if spec is None or problems:
            raise ConfigError(*problems)
        return spec

    def _type_problems(self, config: Config) -> Iterator[str]:
        """Yield sizes that are not numbers, or that cannot be 0: nothing can be computed from them."""
        for ours, keys in self.sizes.items():
            kind = _kind(ours)
            for key in (key for key in _keys(keys) if key in config):
                value = config[key]
                whole = isinstance(value, int) and not isinstance(value, bool)
                if whole and abs(value) >= 2**63:
                    yield f"{key}={str(value)[:12]}... is too large for 64 bits; it is model.{ours} here"
                    continue
                if kind is int and not whole:
                    yield f"{key}={value!r} is not a whole number; it is model.{ours} here"
                elif kind is float and not (whole or isinstance(value, float)):
                    yield f"{key}={value!r} is not a number; it is model.{ours} here"
                elif kind is bool and not isinstance(value, bool):
                    yield f"{key}={value!r} is neither true nor false; it is model.{ours} here"
                elif kind == tuple[int, ...] and not (isinstance(value, list) and all(type(n) is int for n in value)):
                    yield f"{key}={value!r} is not a list of whole numbers; it is model.{ours} here"
                elif ours == "n_heads" and value < 1:
                    yield f"{key}={value} is not positive; it is model.{ours} here"

    def _problems(self, config: Config) -> Iterator[str]:
        quantised = config.get("quantization_config")
        method = None if quantised is None else quantised.get("quant_method", "some method")
        if quantised is not None and method not in self.quantised:
            yield f"the weights are quantised ({method}); convert them to bf16 or fp32 with transformers first"
        if config.get("transformers_weights") is not None:
            yield f"transformers_weights={config['transformers_weights']!r} names other files of weights; leave it out"
        for key, value in self.fixed.items():
            valid = value if isinstance(value, tuple) else (value,)
            if key in config and config[key] not in valid:
                yield f"{key}={config[key]!r} is not supported for {self.model_type}; valid: {valid[0]!r}"

    def config(self, spec: ModelSpec) -> Config:
        """Return the config.json of a model, without the ids of tokens and the type of its weights. Multipliers of muP
        become its constant factors."""
        spec = spec.folded()
        written: Config = {"architectures": [self.class_name], "model_type": self.model_type}
        for ours, keys in self.sizes.items():
            for key in _keys(keys):
                if not key.startswith("_"):
                    value = _value(spec, ours)
                    written[key] = None if value == 0 and key in self.null_if_zero else value
        written |= {key: value[0] if isinstance(value, tuple) else value for key, value in self.fixed.items()}
        rope = write_rope(spec, partial=self.rope_fraction is not None) if spec.positions == "rope" else {}
        return written | rope | self.written(spec)

    def writes(self, spec: ModelSpec) -> bool:
        """Return whether the config.json of a model can be written and read, even if it is then another model."""
        if self.text_defaults is not None:
            return False
        try:
            self.spec(self.config(spec))
        except ConfigError:
            return False
        return True

    def misfits(self, spec: ModelSpec) -> list[str]:
        """Return why a model is not of this architecture: fields that change by writing and reading config.json."""
        if self.text_defaults is not None:
            return [f"only the text part of a {self.model_type} is written; leave --architecture out"]
        spec = spec.folded()
        try:
            if absent := [ours for ours in self.sizes if _value(spec, ours) is _ABSENT]:
                return [f"it has no {ours}" for ours in absent]
            back = self.spec(self.config(spec))
        except ConfigError as error:
            return error.problems
        return [f"{key}={written!r} is {read!r} there" for key, written, read in differences(spec, back)]


def _keys(keys: str | tuple[str, ...]) -> tuple[str, ...]:
    return (keys,) if isinstance(keys, str) else keys


def _kind(path: str) -> Any:
    """Return the type of a field of ModelSpec, or of one of its tables."""
    table, _, name = path.rpartition(".")
    return next(key.type for key in dataclasses.fields(TABLES[table] if table else ModelSpec) if key.name == name)


def _value(spec: ModelSpec, path: str) -> Any:
    value: Any = spec
    for name in path.split("."):
        value = _ABSENT if value is None else getattr(value, name)
    return list(value) if isinstance(value, tuple) else value


def _build(values: Mapping[str, Any]) -> ModelSpec:
    """Return a spec from the values of its fields, fields of tables as `moe.top_k`."""
    tables: dict[str, dict[str, Any]] = {}
    plain: dict[str, Any] = {}
    kinds = {key.name: key.type for key in dataclasses.fields(ModelSpec)}
    for path, value in values.items():
        table, _, name = path.rpartition(".")
        if table:
            tables.setdefault(table, {})[name] = value
        else:
            plain[name] = float(value) if kinds[name] is float else value
    return ModelSpec(**plain, **{name: TABLES[name](**inner) for name, inner in tables.items()})


ARCHITECTURES: dict[str, Architecture] = {}


def register(architecture: Architecture) -> Architecture:
    """Add an architecture: its `model_type` is then valid in a config.json. Raises ConfigError if the type is taken."""
    if architecture.model_type in ARCHITECTURES:
        raise ConfigError(f"the architecture {architecture.model_type!r} is registered already")
    ARCHITECTURES[architecture.model_type] = architecture
    return architecture


def find(config: Config) -> Architecture:
    """Return the architecture of a config.json. Raises ConfigError if it is not supported."""
    model_type = config.get("model_type")
    if model_type not in ARCHITECTURES:
        raise ConfigError(
            f"model_type={model_type!r} is not supported; supported: {', '.join(sorted(ARCHITECTURES))}",
            *_unknown_keys(config),
        )
    architecture = ARCHITECTURES[model_type]
    named = config.get("architectures") or [architecture.class_name]
    if architecture.class_name not in named:
        raise ConfigError(f"architectures={named} has no {architecture.class_name}, the only supported one")
    return architecture


_NO_BLOCK = {
    "architectures", "model_type", "torch_dtype", "dtype", "transformers_version", "use_cache", "bos_token_id",
    "eos_token_id", "pad_token_id", "unk_token_id", "sep_token_id", "auto_map", "attention_dropout",
    "pretraining_tp", "head_dim", "num_key_value_heads", "output_router_logits", "router_aux_loss_coef",
    "is_encoder_decoder", "tie_encoder_decoder", "_name_or_path", "tokenizer_class", "chunk_size_feed_forward",
    "output_attentions", "output_hidden_states", "return_dict", "problem_type", "id2label", "label2id",
    "rope_theta", "rope_scaling", "rope_parameters", "partial_rotary_factor",
}  # fmt: skip
"""Keys that describe no block that an architecture may lack."""


def _unknown_keys(config: Config) -> Iterator[str]:
    """Yield the keys of a config.json of an unknown architecture that no table reads: they are blocks that are not
    supported, unless they are null, false, 0 or empty; and values that every table with the key refuses."""
    read = {key for table in ARCHITECTURES.values() for keys in table.sizes.values() for key in _keys(keys)}
    valid: dict[str, list[Any]] = {}
    for table in ARCHITECTURES.values():
        for key, value in table.fixed.items():
            valid.setdefault(key, []).extend(value if isinstance(value, tuple) else (value,))
    in_use = {key: value for key, value in config.items() if value and key not in _NO_BLOCK}
    unknown = sorted(in_use.keys() - read - valid.keys())
    if unknown:
        yield f"no supported architecture has these keys: {', '.join(f'{key}={in_use[key]!r}' for key in unknown)}"
    for key in sorted(in_use.keys() & valid.keys() - read):
        if in_use[key] not in valid[key]:
            yield f"{key}={in_use[key]!r} is not supported by any architecture; supported: {valid[key][0]!r}"


def architecture_of(spec: ModelSpec, model_type: str | None = None) -> Architecture:
    """Return the architecture of a model, or of the model without its MTP modules.

    `model_type`: the architecture to take; default: the first that fits, in the order of `files`.
    Raises ConfigError with the misfits of this architecture, or of the nearest.
    """
    if model_type is not None and model_type not in ARCHITECTURES:
        raise ConfigError(f"--architecture {model_type}: not known; {nearest(model_type, ARCHITECTURES)}")
    without = replace(spec, mtp_modules=0)
    misfits = {
        name: architecture.misfits(spec if architecture.module else without)
        for name, architecture in ARCHITECTURES.items()
        if model_type in (None, name)
    }
    fitting = [name for name, problems in misfits.items() if not problems]
    if fitting:
        return ARCHITECTURES[fitting[0]]
    if model_type is not None:
        raise ConfigError(f"--architecture {model_type}: the model is another: {'; '.join(misfits[model_type])}")
    # An architecture that cannot write the model's config.json at all is not near, whatever the number of reasons.
    name = min(misfits, key=lambda name: (not ARCHITECTURES[name].writes(spec), len(misfits[name])))
    raise ConfigError(
        f"transformers has no architecture for this model among {', '.join(ARCHITECTURES)}; the nearest is {name}: "
        f"{'; '.join(misfits[name])}"
    )
