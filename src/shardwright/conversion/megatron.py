"""Reads checkpoints of Megatron in its format torch_dist (megatron-core 0.16.1); `megatron_writer` writes them.

FOLDER/latest_checkpointed_iteration.txt     the number of the step
FOLDER/iter_0000005/metadata.json            the name of the format
FOLDER/iter_0000005/common.pt                the number of the step, the run's arguments, AdamW's settings
FOLDER/iter_0000005/.metadata, *.distcp      a distributed checkpoint: NAME, and optimizer.state.KIND.NAME

All layers are one tensor with a first dim (decoder.layers.mlp.linear_fc2.weight), or each has its own
(decoder.layers.3.mlp.linear_fc2.weight), and so have experts. Gate and up are one tensor, or weight_w and weight_v.
"""

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shardwright.conversion.dcp import read_dcp
from shardwright.conversion.dcp_state import SAMPLES, TOKENS, WholeTensors
from shardwright.conversion.names import MEGATRON_LAYERS
from shardwright.conversion.pickled import InertObject, StandIn, load_pickled
from shardwright.conversion.schema import (
    MegatronCommon,
    MegatronCounters,
    MegatronFormat,
    MegatronGroup,
    MegatronOptimizer,
    checked,
)
from shardwright.conversion.state import STEP
from shardwright.model.sections import MoESpec
from shardwright.model.spec import ModelSpec
from shardwright.system.errors import CheckpointError, DamagedError
from shardwright.system.files import inside, open_regular, parse_json, read_bytes, reason
from shardwright.training.checkpoint.manifest import ShardRecord, TensorRecord
from shardwright.training.weights import ShardedTensors

LATEST, COMMON, FORMAT = "latest_checkpointed_iteration.txt", "common.pt", "metadata.json"
BACKEND = "torch_dist"
SHARDING = "fully_reshardable"
"""The form of the distributed optimizer's states that has a tensor for each parameter."""
MASTERS = ("param", "fp32_param")
"""The names of the float32 copies of weights that an optimizer trains."""
_VOCABULARY = ("embedding.word_embeddings.weight", "output_layer.weight")
_CLASSES = (
    "argparse.Namespace", "types.SimpleNamespace", "pathlib.PosixPath", "pathlib._local.PosixPath", "signal.Signals",
)  # fmt: skip
_PLAN_CLASSES = {"megatron.core.dist_checkpointing.strategies.torch": ("MCoreSavePlan", "MCoreMetadata")}
"""Classes of Megatron in a `.metadata`, read as the classes of PyTorch."""
SIZES = {
    "num_layers": "n_layers", "hidden_size": "d_model", "num_attention_heads": "n_heads", "kv_channels": "head_dim",
    "norm_epsilon": "norm_eps", "rotary_base": "rope_theta",
}  # fmt: skip
"""Argument of a run -> the field of ModelSpec that has its value."""
FIXED = {
    "normalization": "RMSNorm", "swiglu": True, "position_embedding_type": "rope", "rotary_percent": 1.0,
    "rotary_interleaved": False, "apply_layernorm_1p": False, "optimizer": "adam", "decoupled_weight_decay": True,
}  # fmt: skip
"""Argument of a run -> the value with which its tensors have the meaning that they have here."""


_IN_BUCKETS = "whose files do not name the parameters in a bucket"
_OTHER_FORMS = {
    "dp_reshardable": _IN_BUCKETS,
    "fully_sharded_bucket_space": _IN_BUCKETS,
    "dp_zero_gather_scatter": "which keeps the states of all data ranks in one object of their layout",
    "fully_sharded_model_space": "which cuts flattened parameters between data ranks",
    "fsdp_dtensor": "which Megatron FSDP writes",
}
"""Form of the distributed optimizer's states that is not read -> why."""
_Places = dict[str, dict[tuple[int, int], tuple[str, tuple[int, ...]]]]


def step_folder(path: Path) -> Path | None:
    """Return the folder of a step in a checkpoint folder of Megatron, or the folder itself if it is one; None if there
    is none."""
    if (path / LATEST).is_file():
        with open_regular(inside(path, LATEST, DamagedError)) as file:
            tag = file.read(100).decode("utf-8", "replace").strip()
        return inside(path, f"iter_{int(tag):07d}" if tag.isdecimal() else tag, DamagedError)
    return path if (path / COMMON).is_file() or _names_a_backend(path) else None


def _names_a_backend(path: Path) -> bool:
    """Return whether a folder has a metadata.json of Megatron; other systems have files with this name, too."""
    if not (path / FORMAT).is_file():
        return False
    with open_regular(inside(path, FORMAT, DamagedError)) as file:
        return b"sharded_backend" in file.read(10_000)


class MegatronFolder(WholeTensors):
    """A checkpoint of Megatron under the names of `dcp_state`, each layer a tensor of its own: NAME,
    optimizer.state.NAME.exp_avg, optimizer.param_groups.NAME.lr and train_state.step. Weights are the float32 copies of
    the optimizer, if there are any."""

    def __init__(self, path: Path, spec: ModelSpec) -> None:
        """`path`: the folder of a step. Raises CheckpointError or DamagedError with the file."""
        super().__init__(path)
        self._spec = spec
        common = self._common()
        dcp = read_dcp(path, _PLAN_CLASSES)
        self._dcp, self._stored = dcp, ShardedTensors(dcp.tensors, dcp.read_shard)
        self._places = self._places_of(dcp.tensors)
        self.tensors = {name: self._record(name) for name in self._places}
        self._read_common(common)

    def file_of(self, name: str) -> Path:
        """Return the file of a value, or of a tensor's first chunk."""
        places = self._places.get(name)
        return self.path / COMMON if places is None else self._dcp.file_of(next(iter(places.values()))[0])

    def read_shard(self, name: str, record: ShardRecord) -> Tensor:
        """Return a whole tensor of one layer, without the rows that pad the vocabulary."""
        by_expert: dict[int, list[Tensor]] = {}
        for (expert, _), (stored, first) in sorted(self._places[name].items()):
            whole = self._stored.shapes[stored]
            low = (*first, *(0,) * (len(whole) - len(first)))
            shape = (*(1,) * len(first), *whole[len(first) :])
            by_expert.setdefault(expert, []).append(self._stored.read(stored, low, shape).view(whole[len(first) :]))
        experts = [torch.cat(halves) for halves in by_expert.values()]
        return experts[0][: record.shape[0]] if next(iter(by_expert)) < 0 else torch.stack(experts)

    def _places_of(self, tensors: Mapping[str, TensorRecord]) -> _Places:
        """Return, for each tensor of one layer, (expert or -1, half) -> (stored tensor, index of the layer in it)."""
        weights: _Places = {}
        masters: _Places = {}
        states: _Places = {}
        for stored, record in tensors.items():
            state = re.fullmatch(r"(?:chained_\d+\.)?optimizer\.state\.([^.]+)\.(.+)", stored)
            kind, name = (state[1], state[2]) if state else ("", stored)
            half, expert = int(name.endswith(".weight_v")), -1
            name = re.sub(r"\.weight_[wv]$", ".weight", name)
            if of_expert := re.fullmatch(r"(.*\.experts)\.(\d+)\.(.+)", name):
                name, expert = f"{of_expert[1]}.{of_expert[3]}", int(of_expert[2])
            if self._spec.moe is not None:  # the specs of layers without Transformer Engine name it as a dense layer's
                name = name.replace("mlp.linear_fc1.layer_norm_weight", "pre_mlp_layernorm.weight")
            rest = name.removeprefix(MEGATRON_LAYERS)
            layers: dict[str, tuple[int, ...]] = {name: ()}
            if rest != name and not rest[0].isdigit():
                if record.shape[:1] != (self._spec.n_layers,):
                    raise CheckpointError(
                        f"{self.path}: {stored} has the shape {list(record.shape)}, and the model has "
                        f"{self._spec.n_layers} layers; give the model of the checkpoint"
                    )
                layers = {f"{MEGATRON_LAYERS}{number}.{rest}": (number,) for number in range(record.shape[0])}
            group = weights if not kind else masters if kind in MASTERS else states
            for layer, index in layers.items():
                key = f"optimizer.state.{layer}.{kind}" if group is states else layer
                group.setdefault(key, {})[expert, half] = stored, index
        return weights | masters | states

    def _record(self, name: str) -> TensorRecord:
        places = self._places[name]
        experts = sorted({expert for expert, _ in places})
        shapes = {}
        for (expert, half), (stored, first) in places.items():
            shapes[expert, half] = self._stored.shapes[stored][len(first) :]
        rows = {expert: sum(shape[0] for (one, _), shape in shapes.items() if one == expert) for expert in experts}
        if len(set(rows.values())) > 1 or experts not in ([-1], [*range(len(experts))]):
            raise DamagedError(f"{self.path}: {name} has the rows {rows} for its experts; they must be equal")
        shape = (rows[experts[0]], *next(iter(shapes.values()))[1:])
        shape = shape if experts == [-1] else (len(experts), *shape)
        vocabulary = self._spec.vocab_size
        if any(part in name for part in _VOCABULARY) and shape[0] > vocabulary:
            self.remarks[f"{shape[0] - vocabulary} rows of the vocabulary"] = (
                f"the model has {vocabulary:,}; Megatron's softmax includes the padding, so its loss is a little "
                f"larger; a config.json with vocab_size={shape[0]} keeps it"
            )
            shape = (vocabulary, *shape[1:])
        dtype = self._stored.dtypes[next(iter(places.values()))[0]]
        return TensorRecord(shape, dtype, (ShardRecord((0,) * len(shape), shape, name, ""),))

    def _common(self) -> MegatronCommon:
        """Return the content of common.pt. Raises CheckpointError for another format."""
        path = inside(self.path, FORMAT, DamagedError)
        if not path.is_file():
            raise CheckpointError(
                f"{path} is missing: the checkpoint is not complete, or of Megatron's older format; supported: "
                f"--ckpt-format {BACKEND}"
            )
        try:
            versions = parse_json(read_bytes(path, 10_000))
        except OSError as error:
            raise CheckpointError(f"{path} cannot be read: {error.strerror}") from None
        except ValueError as error:
            raise DamagedError(f"{path} is damaged: {reason(error)}") from None
        checked(MegatronFormat, versions, path)
        path = inside(self.path, COMMON, DamagedError)
        theirs: list[StandIn] = [(InertObject, name) for name in (*_CLASSES, *_classes_of_megatron(path))]
        return checked(MegatronCommon, load_pickled(path, theirs, "Megatron"), path)

    def _read_common(self, common: MegatronCommon) -> None:
        iteration = common.iteration
        named = re.fullmatch(r"iter_(\d+)", self.path.name)
        if named and int(named[1]) != iteration:
            raise CheckpointError(
                f"{self.path}: its parts are of different steps ({COMMON} is of step {iteration}); copy all files of "
                f"one step"
            )
        if not isinstance(common.args, InertObject | None):
            raise DamagedError(f"{self.path / COMMON}: args={common.args!r:.60}: a Namespace is needed")
        arguments = getattr(common.args, "__dict__", {})
        if problems := list(_other_arguments(arguments, self._spec)):
            raise CheckpointError(*(f"{self.path / COMMON}: {problem}" for problem in problems))
        if not arguments:
            self.remarks["arguments"] = f"{COMMON} has none, so rotary base, eps and sizes are not compared"
        self._values["train_state.step"] = iteration
        counters = checked(MegatronCounters, arguments, f"{self.path / COMMON}: args")
        if common.optimizer is None:
            return
        groups = list(_groups(common.optimizer, f"{self.path / COMMON}: optimizer"))
        if not groups:
            raise DamagedError(f"{self.path / COMMON}: its optimizer has no param_groups")
        steps = {step for _, step in groups}
        if len(steps) == 1 and (skipped := iteration - next(iter(steps))) > 0:
            self.remarks[f"{skipped} steps without an update"] = (
                "AdamW has not counted them, so the position in the data is not known"
            )
            self._values["train_state.step"] = next(iter(steps))
        elif samples := counters.consumed_train_samples:
            self._values[SAMPLES] = samples
            if counters.seq_length:
                self._values[TOKENS] = samples * counters.seq_length
        for name, record in self.tensors.items():
            if not name.startswith("optimizer."):
                group, step = self._group_of(name, record, groups)
                self._values[f"optimizer.state.{name}.{STEP}"] = step
                for key, value in group.items():
                    self._values[f"optimizer.param_groups.{name}.{key}"] = value

    def _group_of(
        self, name: str, record: TensorRecord, groups: list[tuple[dict[str, Any], int]]
    ) -> tuple[dict[str, Any], int]:
        """Return the settings and the number of updates of a parameter. Megatron does not store the parameters of a
        group; it makes the groups by these rules. Raises CheckpointError if several groups fit."""
        rules = {
            "is_expert_parallel": ".experts.experts." in name,
            "is_decoupled_lr": name in _VOCABULARY,
            "without_decay": len(record.shape) == 1 or name.endswith(".bias"),
        }
        fitting = groups
        for key, value in rules.items():
            fitting = [group for group in fitting if group[0][key] == value] or fitting
        if any(group != fitting[0] for group in fitting):
            raise CheckpointError(
                f"{self.path / COMMON}: {name} fits {len(fitting)} groups of the optimizer with other settings; "
                f"supported: groups by weight decay, by experts and by --decoupled-lr"
            )
        return fitting[0]


def _classes_of_megatron(path: Path) -> list[str]:
    """Return the names of Megatron's classes in a file, such as enums in the run's arguments."""
    try:
        with open_regular(path) as file:
            names = torch.serialization.get_unsafe_globals_in_checkpoint(file)
    except Exception:  # damaged, missing: loading it reports it
        return []
    return [name for name in names if name.startswith("megatron.")]


def _other_arguments(arguments: Mapping[str, Any], spec: ModelSpec) -> Iterator[str]:
    """Yield the arguments of a run that differ from the model, or with which tensors have another meaning."""
    for key, field in SIZES.items():
        ours = getattr(spec, field)
        if (theirs := arguments.get(key)) is not None and (isinstance(theirs, Tensor) or theirs != ours):
            yield f"the run has {key}={theirs!r}, and the model has {field}={ours!r}"
    fixed: dict[str, Any] = FIXED | {
        "use_rope_scaling": spec.rope_scaling is not None, "qk_l2_norm": False, "window_size": None,
        "rotary_seq_len_interpolation_factor": None,
    }  # fmt: skip
    if spec.moe is not None:
        fixed |= router_arguments(spec.moe)
    if arguments.get("weight_decay") == 0:
        fixed.pop("decoupled_weight_decay")  # both updates are the same
    for key, valid in fixed.items():
        if (theirs := arguments.get(key)) is not None and (isinstance(theirs, Tensor) or theirs != valid):
            yield f"the run has {key}={theirs!r}; supported: {valid!r}"


def router_arguments(moe: MoESpec) -> dict[str, Any]:
    """Return the arguments of a run with which its router computes as the router of a model."""
    return {
        "moe_router_topk": moe.top_k,
        "moe_router_score_function": moe.score,
        "moe_router_pre_softmax": not moe.normalise,
    }


def _groups(stored: Mapping[Any, Any], where: str) -> Iterator[tuple[dict[str, Any], int]]:
    """Yield the settings and the number of updates of each group of an optimizer, or of several. Raises CheckpointError
    for states whose tensors are not of one parameter each. `where`: the file and the key, for errors."""
    optimizer = checked(MegatronOptimizer, stored, where)
    if (form := optimizer.param_state_sharding_type) not in (None, SHARDING):
        reason = _OTHER_FORMS.get(str(form), "which is not known here")
        raise CheckpointError(
            f"{where}: the distributed optimizer's states are in the form {form}, {reason}; supported: {SHARDING} "
            f"(load it in Megatron Core 0.15 or newer and save a step with --dist-ckpt-optim-fully-reshardable)"
        )
    if optimizer.param_groups is None:
        for key, value in stored.items():
            if isinstance(value, Mapping) and (isinstance(key, int) or key == "optimizer"):
                yield from _groups(value, f"{where}.{key}")
        return
    for number, stored_group in enumerate(optimizer.param_groups):
        group = checked(MegatronGroup, stored_group, f"{where}.param_groups.{number}")
        settings = group.model_dump(exclude={STEP})
        wd_mult, lr_mult = (
            next((n for n in pair if n is not None), 1.0)
            for pair in ((group.wd_mult, group.pre_wd_mult), (group.lr_mult, group.pre_lr_mult))
        )
        settings["without_decay"] = wd_mult == 0
        if settings["without_decay"]:
            settings["weight_decay"] = 0.0
        if group.max_lr is not None:
            settings["initial_lr"] = group.max_lr * lr_mult
        step = optimizer.state.common_step if group.step is None else group.step
        if step is None:
            raise DamagedError(f"{where}.param_groups.{number}.{STEP} is missing")
        yield settings, step
