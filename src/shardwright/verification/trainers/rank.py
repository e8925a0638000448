"""The program of each rank: the steps of a user's Trainer, with its results recorded.

Shapes: B sequences of the global batch, T tokens.
"""

import math
import numbers
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate

from shardwright.data.samples import IGNORE
from shardwright.parallel.boxes import TensorShard, local_box
from shardwright.parallel.objects import gathered
from shardwright.system.errors import InputError, LayoutError, ShardwrightError, nearest
from shardwright.system.processes import ranks_in_words
from shardwright.system.units import divisors
from shardwright.verification.case import DTYPES
from shardwright.verification.trace import RankTrace, TracedQuantity, TraceRecorder
from shardwright.verification.trainers.adapter import (
    Options,
    StepBatch,
    World,
    environment_error,
    invalid_degrees,
    trainer_class,
)
from shardwright.verification.trainers.case import UNCLIPPED, TrainerCase, TrainerLayout

WEIGHTS = "weights.safetensors"
_NOISE = 0.02
"""Standard deviation of the noise that is added to tensors whose elements are all equal."""


def train_rank(case: TrainerCase, layout: TrainerLayout, folder: Path) -> RankTrace:
    """Take the steps of a case as one rank of a trainer. Makes the initial weights if the case has none."""
    try:
        return _train(case, layout, folder)
    except ShardwrightError:
        raise
    except Exception as error:
        if (known := environment_error(layout.trainer, error)) is not None:
            raise known from error
        raise


def _train(case: TrainerCase, layout: TrainerLayout, folder: Path) -> RankTrace:
    dtype = DTYPES[case.dtype][0]
    torch.set_default_dtype(dtype)
    kind, recorder, read = trainer_class(layout.trainer), TraceRecorder(folder), set[str]()
    options = Options(dict(layout.options))
    world = World(dist.get_rank(), dist.get_world_size(), dict(layout.degrees), options, dtype, case.seed)
    if reason := invalid_degrees(layout.trainer, case.spec, [world.axes], dict(layout.options))[0]:
        raise InputError(f"{layout}: {reason}")
    for training in case.trainings:
        torch.manual_seed(case.seed)
        trainer = kind(case.spec, world)
        if not case.weights:
            _write_weights(trainer, case, folder)
        weights = _weights(Path(case.weights or folder), dtype)
        trainer.load(weights)
        initial = _checked("parameters()", trainer.parameters(), weights, dtype)
        if layout.is_reference:
            _check_loaded(initial, weights)
        if training == case.trainings[0]:
            recorder.tensors(TracedQuantity("initial", training, 0), initial)
        for step in range(case.steps):
            limit = case.clip_norm(training, step, _norm_of(recorder.trace, step))
            recorder.trace.clip_norms.setdefault(training, []).append(limit)
            batch = local_batch(case, trainer, world, step, training, limit)
            recorder.scalar(TracedQuantity("loss", training, step + 1), _loss(trainer.step(batch)))
            gradients = _checked("gradients()", trainer.gradients(), weights, dtype, trainer.parameters())
            n_first = recorder.tensors(TracedQuantity("gradient", training, step + 1), gradients)
            given = trainer.gradient_norm() if hasattr(trainer, "gradient_norm") else _norm(gradients, n_first)
            norm = torch.tensor(_number("gradient_norm()", given), dtype=torch.float64)
            recorder.scalar(TracedQuantity("grad norm", training, step + 1), norm)
            parameters = _checked("parameters()", trainer.parameters(), weights, dtype)
            recorder.tensors(TracedQuantity("parameter", training, step + 1), parameters)
            read |= batch.names_read
        del trainer, gradients, parameters
    for names, also in gathered((sorted(options.names_read), sorted(read)), tuple[list[str], list[str]]):
        options.names_read.update(names)  # an option may concern some ranks only
        read.update(also)
    if not layout.is_reference:
        options.check_read(world.axes)
    recorder.trace.ignored = [name for name in ("clip_norm", "lr") if name not in read]
    return recorder.trace


def local_batch(
    case: TrainerCase, trainer: Any, world: World, step: int, training: str = UNCLIPPED, limit: float = math.inf
) -> StepBatch:
    """Return the part of a batch of this rank: of data rank `trainer.data_rank` of `trainer.data_ranks`, by default of
    each rank of the world its own."""
    ranks, rank = getattr(trainer, "data_ranks", world.size), getattr(trainer, "data_rank", world.rank)
    if type(rank) is not int or type(ranks) is not int or not 0 <= rank < ranks:
        raise InputError(f"data_rank={rank} of rank {world.rank}: valid are 0 to data_ranks - 1 = {ranks - 1}")
    block, rest = divmod(case.global_batch, ranks)
    n_sequences = min(case.micro_batch, block) if case.accumulates else block
    if rest or block % max(1, n_sequences):
        raise LayoutError(
            f"{ranks} data ranks cannot share {case.global_batch} sequences in micro-batches of {case.micro_batch}; "
            f"valid numbers of data ranks: {', '.join(map(str, divisors(case.global_batch // case.micro_batch)))}"
        )
    tokens_BT, targets_BT, _ = case.batch(step)
    rows = slice(rank * block, (rank + 1) * block)
    parts = zip(tokens_BT[rows].split(n_sequences), targets_BT[rows].split(n_sequences), strict=True)
    return StepBatch(step, list(parts), int((targets_BT != IGNORE).sum()), case.rate(training, step), limit)


def _write_weights(trainer: Any, case: TrainerCase, folder: Path) -> None:
    """Write the weights that a trainer starts with. Noise is added to a tensor whose elements are all equal, such as a
    bias of zeros, because a shard at the wrong place would not change it."""
    weights, generator = {}, torch.Generator().manual_seed(case.seed)
    for name, tensor in _tensors("parameters()", _mapping("parameters()", trainer.parameters())).items():
        whole = tensor.tensor.contiguous()
        if whole.shape != tensor.shape:
            raise InputError(
                f"parameters() of the reference has a shard {tuple(whole.shape)} of {name}; in one process the whole "
                f"tensor {tuple(tensor.shape)} is needed"
            )
        noise = torch.randn(whole.shape, generator=generator, dtype=torch.float64).to(whole.dtype)
        weights[name] = whole + _NOISE * noise if whole.numel() and bool((whole == whole.flatten()[0]).all()) else whole
    save_file(weights, folder / WEIGHTS)


def _weights(folder: Path, dtype: torch.dtype) -> dict[str, Tensor]:
    return {name: tensor.to(dtype) for name, tensor in load_file(folder / WEIGHTS).items()}


def _check_loaded(initial: Mapping[str, TensorShard], weights: Mapping[str, Tensor]) -> None:
    """Raise InputError if the reference's parameters are not the weights that its `load` was given."""
    others = [name for name, weight in weights.items() if not torch.equal(initial[name].tensor, weight)]
    if others:
        raise InputError(
            f"load() of the reference did not set {others[0]}: parameters() has other values "
            f"({len(others)} of {len(weights)} tensors); copy each tensor of the argument into its parameter"
        )


def _number(method: str, value: Any) -> float:
    """Return a number that a method returned. Raises InputError for any other object."""
    if isinstance(value, Tensor) and value.numel() == 1:
        return float(value)
    if isinstance(value, numbers.Real):
        return float(value)
    kind = f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
    raise InputError(f"{method} returned {kind}; a number or a tensor with one element is needed")


def _loss(value: Any) -> Tensor:
    """Return the loss that this rank's `step` returned; if that is None, the first other rank's."""
    loss = None if value is None else _number("step()", value)
    losses: list[float | None] = gathered(loss, float | None)
    known = [loss for loss in losses if loss is not None]
    if not known:
        raise InputError("step() returned None on every rank; the loss of the global batch is needed from one at least")
    return torch.tensor(known[0] if loss is None else loss, dtype=torch.float64)


def _checked(
    method: str,
    given: Any,
    weights: Mapping[str, Tensor],
    dtype: torch.dtype,
    parameters: Mapping[str, Any] | None = None,
) -> dict[str, TensorShard]:
    """Return the tensors that a method returned on this rank, after the ranks have compared all names and shapes with
    the initial weights. `parameters`: if gradients may be None, the parameters whose zeros replace them."""
    given = _mapping(method, given)
    absent = {} if parameters is None else {name: value is None for name, value in given.items()}
    missing: list[dict[str, bool]] = gathered(absent, dict[str, bool])
    for name in dict.fromkeys(name for ranks in missing for name in ranks):
        without = [rank for rank, ranks in enumerate(missing) if ranks.get(name) is True]
        having = [rank for rank, ranks in enumerate(missing) if ranks.get(name) is False]
        if without and having:
            raise InputError(
                f"gradients() has None for {name} on {ranks_in_words(without)} and a tensor on "
                f"{ranks_in_words(having)}; use zeros where a rank computed no gradient, and reduce them with the rest"
            )
    filled = {name: parameters.get(name) if value is None and parameters else value for name, value in given.items()}
    tensors = _tensors(method, filled)
    for name in [name for name in tensors if absent.get(name)]:
        tensors[name].tensor.zero_()
    shapes: list[dict[str, tuple[int, ...]]] = gathered(
        {name: tuple(tensor.shape) for name, tensor in tensors.items()}, dict[str, tuple[int, ...]]
    )
    union = {name: shape for ranks in shapes for name, shape in ranks.items()}
    problems = [
        f"{method}: {name} is no name of the reference; {nearest(name, weights)}" for name in union.keys() - weights
    ]
    problems += [f"{method}: {name} is on no rank; {nearest(name, union)}" for name in weights.keys() - union.keys()]
    problems += [
        f"{method}: the whole {name} has shape {shape}, and {tuple(weights[name].shape)} in the reference"
        for name, shape in union.items()
        if name in weights and tuple(weights[name].shape) != shape
    ]
    if problems:
        raise InputError(*sorted(problems))
    if method == "parameters()" and (other := {entry.tensor.dtype for entry in tensors.values()} - {dtype}):
        raise InputError(
            f"{method}: parameters are {' and '.join(map(str, other))}, and {dtype} is compared; make the model in "
            f"world.dtype, which is also torch.get_default_dtype() while the trainer is made"
        )
    return tensors


def _mapping(method: str, given: Any) -> Mapping[str, Any]:
    if not isinstance(given, Mapping):
        raise InputError(f"{method} returned {type(given).__name__}; a dict of global names and tensors is needed")
    return given


def _tensors(method: str, given: Mapping[str, Any]) -> dict[str, TensorShard]:
    result: dict[str, TensorShard] = {}
    for name, value in given.items():
        if not isinstance(value, Tensor | TensorShard):
            raise InputError(
                f"{method}: {name} is of type {type(value).__name__}; a whole tensor, a DTensor or "
                f"shardwright.testing.TensorShard(tensor, offsets, shape) is needed"
            )
        data = value.tensor if isinstance(value, TensorShard) else value
        if data.layout != torch.strided or data.is_meta:
            kind = "on the meta device" if data.is_meta else f"of the layout {data.layout}"
            raise InputError(f"{method}: {name} is {kind}; a dense tensor with values is needed, as of to_dense()")
        if isinstance(value, TensorShard):
            _check_shard(method, str(name), value)
        if isinstance(value, DTensor) and any(place.is_partial() for place in value.placements):
            value = value.redistribute(placements=[Replicate() if p.is_partial() else p for p in value.placements])
        local, offsets = local_box(value)
        result[str(name)] = TensorShard(local.clone(), offsets, tuple(value.shape))  # gradients may share a bucket
    return result


def _check_shard(method: str, name: str, shard: TensorShard) -> None:
    """Raise InputError for a shard that is not within its tensor."""
    shape, offsets, whole = tuple(shard.tensor.shape), tuple(shard.offsets), tuple(shard.shape)
    inside = len(offsets) == len(shape) == len(whole) and all(
        start >= 0 and start + n <= most for start, n, most in zip(offsets, shape, whole, strict=True)
    )
    if not inside:
        raise InputError(f"{method}: the shard {shape} of {name} at {offsets} is not within its tensor {whole}")


def _norm(gradients: Mapping[str, TensorShard], names: list[str]) -> Tensor:
    """Return the norm of the whole gradients. `names`: the shards that no earlier rank has."""
    squares = [gradients[name].tensor.double().square().sum() for name in names]
    total = torch.stack(squares).sum() if squares else torch.zeros((), dtype=torch.float64)
    dist.all_reduce(total)
    return total.sqrt()


def _norm_of(trace: RankTrace, step: int) -> float:
    """Return the gradient norm of a step of the training without clipping; NaN before that training has taken it."""
    return trace.scalars.get(TracedQuantity("grad norm", UNCLIPPED, step + 1), math.nan)
