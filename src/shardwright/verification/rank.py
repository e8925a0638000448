"""The program of each rank that is verified: the training step, with all results recorded.

Shapes: A micro-batches, B sequences, T tokens.
"""

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardwright.data.batches import Batch
from shardwright.layout.box import DENSE_AXES
from shardwright.layout.layout import Layout
from shardwright.model.modules import row_of
from shardwright.model.transformer import Transformer
from shardwright.parallel import compressed, data, loss, topk, whole_matrices
from shardwright.parallel.apply import apply
from shardwright.parallel.boxes import TensorShard
from shardwright.parallel.initialise import materialise
from shardwright.parallel.norm import local_part
from shardwright.parallel.placement import ExpertPlaces
from shardwright.parallel.stored import shard_of_values
from shardwright.system.units import KiB
from shardwright.training import forward_backward, on_shards
from shardwright.training.average import WeightAverage
from shardwright.training.checkpoint.state import named_tensors
from shardwright.training.loss_scale import loss_scaler
from shardwright.training.offload.states import states_location
from shardwright.training.on_shards import OptimizerOnShards
from shardwright.training.optimizer import build_optimizer
from shardwright.training.optimizers import adamw_8bit
from shardwright.training.step import Trainer
from shardwright.verification.case import ADAPTER_STD, DTYPES, PLAIN_SGD, Case
from shardwright.verification.trace import RankTrace, TracedQuantity, TraceRecorder

BUCKETS = (
    (data, "BUCKET_BYTES"),
    (data, "CONVERTED_BYTES"),
    (compressed, "REPLICA_BUCKET_BYTES"),
    (topk, "REPLICA_BUCKET_BYTES"),
    (whole_matrices, "BUCKET_BYTES"),
    (on_shards, "BUCKET_BYTES"),
    (adamw_8bit, "BUCKET_BYTES"),
)
"""The sizes of everything that is sent, converted or updated together, each in the module that reads it."""


@contextmanager
def several_of_each(case: Case, layout: Layout) -> Iterator[None]:
    """Shrink the sizes of buckets, of the logits that the loss takes at a time and of the micro-batches that are
    evaluated together, so that a model at test size has several of each, like a model at true size; smaller sizes stay.
    """
    element_bytes, matrix = DTYPES[case.dtype][1].itemsize, case.spec.d_model * case.spec.d_ffn
    sizes = dict.fromkeys(BUCKETS, max(1, matrix * element_bytes // 2))
    sizes[whole_matrices, "BUCKET_BYTES"] = 3 * matrix * element_bytes  # several owners in each
    sizes[loss, "LOGITS_TOGETHER"] = max(1, case.micro_batch * case.seq_len // 5) * case.spec.vocab_size
    n_microbatches = case.global_batch // (layout.data_ranks * case.micro_batch)
    sizes[forward_backward, "EVALUATED_TOGETHER"] = max(1, n_microbatches - 1)
    before = {(module, name): getattr(module, name) for module, name in sizes}
    try:
        for (module, name), size in sizes.items():
            setattr(module, name, min(size, before[module, name]))
        yield
    finally:
        for (module, name), size in before.items():
            setattr(module, name, size)


def train_rank(case: Case, layout: Layout, folder: Path) -> RankTrace:
    """Take the steps of a case with each optimizer, as one rank of a layout."""
    with several_of_each(case, layout):
        return _train(case, layout, folder)


def _train(case: Case, layout: Layout, folder: Path) -> RankTrace:
    recorder, rank = TraceRecorder(folder), dist.get_rank()
    for training in case.trainings:
        trainer = build_trainer(case, layout, training, folder)
        parameters = trainer.model.named_parameters
        if training == PLAIN_SGD:
            recorder.tensors(TracedQuantity("initial", training, 0), _values(case, parameters))
        batches = [local_batch(case, layout, rank, step) for step in range(case.steps + 1)]
        if case.preference.has_reference:
            batches = [with_references(batch, trainer.document_log_probs([batch])) for batch in batches]
        for step in range(case.steps):
            overflows = step == case.overflow_step
            if overflows and _overflows(layout, rank):
                overflow_once(trainer.model.parts)
            parts = trainer.forward_backward(batches[step], step)
            recorder.scalar(TracedQuantity("loss", training, step + 1), trainer.model.sum_over_losses(parts.loss_part))
            if parts.mtp_part is not None:
                recorder.scalar(
                    TracedQuantity("mtp loss", training, step + 1), trainer.model.sum_over_losses(parts.mtp_part)
                )
            gradients = {
                n: _without(trainer.loss_scale, p, values)
                for (n, p), values in zip(parameters.items(), _values(case, parameters).values(), strict=True)
            }
            if trainer.model.places is not None:
                parts_of_ranks = {n: gradient for n, gradient in gradients.items() if isinstance(gradient, Tensor)}
                gradients.update(trainer.model.places.at_home(parts_of_ranks))
            if not overflows:
                recorder.tensors(TracedQuantity("gradient", training, step + 1), gradients)
            scale = case.scale(training, step)
            for parameter in parameters.values():
                if parameter.grad is not None and scale != 1:
                    local_part(parameter.grad).mul_(scale)
            norm = trainer.update(case.rate(training, step) / scale, case.clip_norm(training, step))
            if trainer.average is not None:
                trainer.average.update(step + 1)
            if trainer.model.places is not None:
                shift_experts(trainer.model.places, trainer, step + 1)
            if not overflows:
                recorder.scalar(TracedQuantity("grad norm", training, step + 1), norm)
            if case.evaluate and step == 0:
                sums, counts = trainer.evaluation_sums([batches[case.steps]])
                mean, *ahead = sums / counts.clamp(min=1)  # a module may have no target in a batch of short sequences
                recorder.scalar(TracedQuantity("evaluation", training, 1), mean)
                if case.spec.mtp_modules:
                    recorder.scalar(TracedQuantity("mtp evaluation", training, 1), torch.stack(ahead).mean())
        if trainer.model.places is not None:
            trainer.model.places.move(trainer.model.places.home, named_tensors(trainer))
        recorder.tensors(TracedQuantity("parameter", training, case.steps), _values(case, parameters))
        if trainer.average is not None:
            with trainer.average.applied(case.steps):
                recorder.tensors(TracedQuantity("average", training, case.steps), _values(case, parameters))
        del trainer, parameters, gradients
    return recorder.trace


def shift_experts(places: ExpertPlaces, trainer: Trainer, step: int) -> None:
    """Move experts after a step: most of them, to other ranks than after the steps before. A run moves the experts that
    its load asks for; the order changes no number."""
    shifted = {layer: (*order[step:], *order[:step]) for layer, order in places.home.items()}
    places.move(shifted, named_tensors(trainer))


CHUNK_BYTES = 12 * KiB
"""Size for offloaded states: a model at test size has several chunks or buckets; large matrices on a disk are in
several."""


def build_trainer(case: Case, layout: Layout, training: str, folder: Path | None = None) -> Trainer:
    """Return the trainer of this rank, with the optimizer `training`. `folder`: for states on a disk; by default the
    folder of temporary files."""
    device = torch.device("cpu")
    kept, compute = DTYPES[case.dtype]
    if layout.offload_activations != "none":
        layout = layout.changed(offload_min_bytes=1)  # a model at test size has no large tensors
    model = apply(
        case.spec,
        layout,
        device,
        seed=case.seed,
        param_dtype=kept,
        compute_dtype=compute,
        compile_blocks=case.compiled,
        seq_len=case.seq_len,
        fp8=case.fp8,
        fill=partial(materialise, b_std=ADAPTER_STD),
    )
    optimizer: torch.optim.Optimizer
    if training == PLAIN_SGD:
        trained = [parameter for parameter in model.named_parameters.values() if parameter.requires_grad]
        optimizer = OptimizerOnShards(torch.optim.SGD([{"params": trained}]))  # a stage may have none
    else:
        states = states_location(layout, folder or Path(tempfile.gettempdir()), CHUNK_BYTES)
        optimizer = build_optimizer(model.named_parameters, case.spec, case.optimizer, states, model.observers)
    return Trainer(
        model,
        optimizer,
        device=device,
        seed=case.seed,
        clip_norm=case.optimizer.clip_norm,
        compile_loss=case.compiled,
        restart_positions=case.positions == "document",
        scaler=None if case.loss_scaling is None else loss_scaler(case.loss_scaling),
        average=None if case.average.kind == "none" else WeightAverage(model, case.average, case.steps),
        preference=case.preference,
    )


def _values(case: Case, parameters: Mapping[str, Tensor]) -> dict[str, Tensor | TensorShard]:
    """Return the parameters, and the values of quantised ones."""
    compute = DTYPES[case.dtype][1]
    return {name: shard_of_values(row_of(case.spec, name), p, compute) for name, p in parameters.items()}


def _without(loss_scale: float, parameter: Tensor, values: Tensor | TensorShard) -> Tensor | TensorShard:
    """Return the gradient of a parameter with these values without the loss scale; zeros if there is none."""
    if isinstance(values, TensorShard):
        return values._replace(tensor=torch.zeros_like(values.tensor))
    if parameter.grad is None:
        return torch.zeros_like(parameter)
    return parameter.grad if loss_scale == 1 else parameter.grad / loss_scale


def _overflows(layout: Layout, rank: int) -> bool:
    """Return whether a rank has the overflowing gradient: the first rank, and tp ranks that compute the same."""
    coordinates = layout.coordinates(rank)
    return not any(coordinates[axis] for axis in DENSE_AXES if axis != "pp" and (axis != "tp" or layout.token_shards))


def overflow_once(parts: Sequence[Transformer]) -> None:
    """Make one element of the gradient of the embedding's next output infinite, on this rank, if it has the embedding.

    Only the shard of the embedding that has that token's row, on the ranks that hold it, then has an infinite gradient.
    A frozen embedding has no gradient: the first block of each stage with a gradient takes its place.
    """
    spoilt: Sequence[nn.Module] = [part.embedding for part in parts if part.embedding is not None][:1]
    if any(part.spec.lora is not None for part in parts):
        spoilt = [block for part in parts for block in part.layers.values()]

    def spoil(_: nn.Module, inputs: object, output_BTD: Tensor) -> None:
        if output_BTD.requires_grad:
            for handle in handles:
                handle.remove()
            output_BTD.register_hook(_with_infinity)

    handles = [module.register_forward_hook(spoil) for module in spoilt]


def _with_infinity(gradient_BTD: Tensor) -> Tensor:
    spoiled_BTD = gradient_BTD.clone()
    spoiled_BTD[0, 0, 0] = torch.inf
    return spoiled_BTD


def local_batch(case: Case, layout: Layout, rank: int, step: int) -> Batch:
    """Return a rank's share of a step, partitioned as by data/batches.py: contiguous blocks in order of data ranks."""
    case = case.step_case(step)
    block = case.global_batch // layout.data_ranks
    first = layout.data_rank(rank) * block
    tokens_BT, targets_BT, ids_B = (whole[first : first + block] for whole in case.batch(step))
    documents_B, n_real_B = case.documents(step), case.n_real(step)
    documents = None if documents_B is None else documents_B[first : first + block]
    n_real = None if n_real_B is None else n_real_B[first : first + block]
    references = None
    if case.preference.kind != "none":
        assert documents is not None
        references = [[0.0] * (len(lengths) // 2 * 2) for lengths in documents]
    return Batch.from_sequences(tokens_BT, targets_BT, ids_B, case.micro_batch, documents, n_real, references)


def with_references(batch: Batch, log_probs: Sequence[Tensor]) -> Batch:
    """Return a batch with the reference's log-probability of each answer. `log_probs`: of the documents of each
    micro-batch, (D,)."""
    assert batch.references_AB is not None
    references = []
    for rows, values_D in zip(batch.references_AB, log_probs, strict=True):
        values = iter(values_D.tolist())
        references.append(tuple(tuple(next(values) for _ in row) for row in rows))
    return replace(batch, references_AB=tuple(references))
