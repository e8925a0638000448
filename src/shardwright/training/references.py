"""The log-probabilities of answers under the reference of a run, which is the model before the first step.

They are computed once, on the run's layout, in one forward pass over all pairs of the splits that the run reads, and
kept in OUT/reference.safetensors: a tensor SPLIT/N for each source N, with a number for each document. A run that is
resumed reads them. The file has the fingerprint of the data and the digest of the weights, which each checkpoint of the
run has, too.
"""

import hashlib
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save
from torch import Tensor

from shardwright.config import RunConfig
from shardwright.data.batches import PADDING_ID, Batch
from shardwright.data.samples import PairSamples, Samples
from shardwright.model.modules import row_of
from shardwright.model.quantised import decode, stored_row
from shardwright.model.row import Row
from shardwright.parallel.model import ParallelModel
from shardwright.parallel.observer import StepPhase
from shardwright.runs.folder import REFERENCE
from shardwright.system.errors import DataError
from shardwright.system.files import inside, write_whole
from shardwright.training.checkpoint.plan import TensorPiece, plan_of
from shardwright.training.forward_backward import ForwardBackward
from shardwright.training.hooks import RunStart
from shardwright.training.run_log import RunLog
from shardwright.training.sources import RunReferences, Sources, split_batches, values_of_answers

_DIGESTED_TOGETHER = 2**20
"""Elements of a tensor that are digested at a time, with 8 bytes each."""


def run_references(
    config: RunConfig, work: ForwardBackward, sources: Sources, start: RunStart, log: RunLog
) -> RunReferences | None:
    """Return the references of a run that starts at `start`; None for a run on the next token. Every rank calls this.

    The forward pass over the pairs is reported as evaluation. Raises DataError for a resumed run whose file
    is missing, damaged, of other data or weights, or without a split.
    """
    if config.preference.kind == "none":
        return None
    if not config.preference.has_reference:
        return RunReferences(sources, None)
    path = Path(config.out) / REFERENCE
    fingerprint = " ".join(sources.fingerprints)
    splits = {f"train/{n}": samples for n, samples in enumerate(sources.train.sources)}
    splits |= {f"validation/{n}": samples for n, samples in enumerate(sources.validation.values())}
    if start.checkpoint is not None:
        values = read_references(path, fingerprint, start.reference, splits, start.step)
        return RunReferences(sources, values, start.reference)
    digest = weights_digest(work.model)
    values = {name: reference_log_probs(config, work, split) for name, split in splits.items()}
    if dist.get_rank() == 0:
        write_whole(path, save(values, {"fingerprint": fingerprint, "weights": digest}))
    n_answers = sum(map(len, values.values()))
    log.say(f"log-probabilities of {n_answers:,} answers under the reference, written to {path}")
    return RunReferences(sources, values, digest)


def reference_log_probs(config: RunConfig, work: ForwardBackward, samples: Samples) -> np.ndarray:
    """Return the log-probability of each document of a split of pairs under the current weights, float64, equal on all
    ranks."""
    assert isinstance(samples, PairSamples), samples
    total = torch.zeros(samples.split.n_documents, dtype=torch.float64, device=work.device)
    batches = split_batches(config, dist.get_rank(), samples, lambda i: values_of_answers(None, samples, i))
    documents: list[list[int]] = []
    phase = StepPhase("evaluation", 0)

    def noted() -> Iterator[Batch]:
        for batch in batches:
            work.model.observers.begin(phase)  # a limit of its own for each micro-batch, as the whole pass takes long
            indices = [i for i in batch.sample_ids_AB.flatten().tolist() if i != PADDING_ID]
            documents.append([document for i in indices for document in samples.answers(i)])
            yield batch

    results: list[Tensor] = work.document_log_probs(noted())
    work.model.observers.end(phase)
    for numbers, values_D in zip(documents, results, strict=True):
        total[torch.tensor(numbers, dtype=torch.int64, device=work.device)] = values_D
    log_probs: np.ndarray = work.model.sum_over_samples(total).cpu().numpy()
    return log_probs


_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""The integers with the same number of bytes as a type."""


def _values_of(piece: TensorPiece, tensors: Mapping[str, Tensor], row: Row) -> Iterator[Tensor]:
    """Yield the elements of a piece, some at a time; of a quantised matrix, whose bytes differ between layouts, the
    values that they stand for."""
    tensor = piece.view(tensors)
    if not row.stored:
        yield from tensor.flatten().split(_DIGESTED_TOGETHER)
        return
    stored = stored_row(row, tensor, piece.offsets, tuple(tensors[piece.name].shape))
    for some in tensor.flatten(0, -2).split(max(1, _DIGESTED_TOGETHER // row.shape[-1])):
        yield decode(some, stored, torch.float32).flatten()


@torch.no_grad()
def weights_digest(model: ParallelModel) -> str:
    """Return a digest of the weights of a model, equal on all ranks and layouts: 16 hexadecimal digits. A collective.

    The sum, modulo 2^64, over all elements of a hash of the tensor's name and the element's bits. It does not depend on
    the order of the elements of a tensor.
    """
    tensors = {name: parameter.detach() for name, parameter in model.named_parameters.items()}
    total = torch.zeros((), dtype=torch.int64, device=next(iter(tensors.values())).device)
    for piece in plan_of(tensors).pieces:
        key = int.from_bytes(hashlib.sha256(piece.name.encode()).digest()[:7], "big")
        for values in _values_of(piece, tensors, row_of(model.spec, piece.name)):
            hashed = (values.view(_INTEGERS[values.element_size()]).to(torch.int64) + key) * 0x1E3779B97F4A7C15
            hashed = (hashed ^ (hashed >> 29)) * 0x3F58476D1CE4E5B9
            total += (hashed ^ (hashed >> 32)).sum().to(total.device)
    dist.all_reduce(total)
    return f"{int(total) % 2**64:016x}"


def read_references(
    path: Path,
    fingerprint: str,
    digest: str | None,
    splits: Mapping[str, Samples],
    step: int,
    way_out: str = "start a new run",
) -> dict[str, np.ndarray]:
    """Return the values of a run's reference.safetensors, by SPLIT/N.

    `fingerprint`, `digest`: of the data and of the weights that the file has to be of; `splits`: the splits that it has
    to contain; `step`: of the checkpoint; `way_out`: what else the user can do, for errors. Raises DataError for a file
    that is missing, damaged, or of others.
    """
    path = inside(path.parent, path.name, DataError)
    try:
        with safe_open(path, "np") as file:
            metadata = file.metadata() or {}
            values = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - no dict
    except FileNotFoundError:
        raise DataError(
            f"{path} is missing: it has the log-probabilities of the model before the first step, and the checkpoint "
            f"is of step {step}; copy it from the folder of the run that wrote the checkpoint, or {way_out}"
        ) from None
    except (OSError, SafetensorError) as error:
        raise DataError(f"{path} is damaged ({error}); copy it again, or {way_out}") from None
    if metadata.get("fingerprint") != fingerprint:
        raise DataError(f"{path} is of other data than is read now; prepare the data as before, or {way_out}")
    if metadata.get("weights") != digest:
        raise DataError(
            f"{path} is of the weights {metadata.get('weights')}, and the reference of the run that wrote the "
            f"checkpoint of step {step} has {digest}; copy it from the folder of this run, or {way_out}"
        )
    for name, samples in splits.items():
        n_answers, n_there = samples.origin(0)[0].n_documents, len(values.get(name, ()))
        if n_there != n_answers:
            split = name.partition("/")[0]
            raise DataError(
                f"{path} has {n_there:,} log-probabilities for the {n_answers:,} answers of the {split} split: the run "
                f"that wrote it did not read the split; "
                + (f"set evaluation.samples=0, or {way_out}" if split == "validation" else way_out)
            )
    return values
