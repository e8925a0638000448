"""The log-probabilities of answers under the reference of a run, which is the model before the first step.

They are computed once, on the run's layout, in one forward pass over all pairs of the splits that the run reads, and
kept in OUT/reference.safetensors: a tensor SPLIT/N for each source N, with a number for each document. A run that is
resumed reads them.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save
from torch import Tensor

from shardwright.config import RunConfig
from shardwright.data.batches import PADDING_ID, Batch, evaluation_batches
from shardwright.data.samples import PairSamples, Samples
from shardwright.run_folder import REFERENCE
from shardwright.system.errors import DataError
from shardwright.system.files import inside, write_whole
from shardwright.training.clock import Phases
from shardwright.training.hooks import RunStart
from shardwright.training.run_log import RunLog
from shardwright.training.sources import RunReferences, Sources
from shardwright.training.step import ForwardBackward


def run_references(
    config: RunConfig, work: ForwardBackward, sources: Sources, start: RunStart, log: RunLog, phases: Phases
) -> RunReferences | None:
    """Return the references of a run that begins at `start`; None for a run on the next token. Every rank calls this.

    The forward pass over the pairs is reported to `phases` as evaluation. Raises DataError for a resumed run whose file
    is missing, damaged, of other data or without a split.
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
        path = inside(path.parent, path.name, DataError)
        return RunReferences(sources, _read(path, fingerprint, start.step, splits))
    values = {name: reference_log_probs(config, work, each, phases) for name, each in splits.items()}
    if dist.get_rank() == 0:
        write_whole(path, save(values, {"fingerprint": fingerprint}))
    n_answers = sum(map(len, values.values()))
    log.say(f"log-probabilities of {n_answers:,} answers under the reference, written to {path}")
    return RunReferences(sources, values)


def reference_log_probs(config: RunConfig, work: ForwardBackward, samples: Samples, phases: Phases) -> np.ndarray:
    """Return the log-probability of each document of a split of pairs under the current weights, float64, equal on all
    ranks."""
    assert isinstance(samples, PairSamples), samples
    layout = config.layout.layout()
    total = torch.zeros(samples.split.n_documents, dtype=torch.float64, device=work.device)
    batches = evaluation_batches(
        samples,
        micro_batch=config.batch.schedule.longest.micro_batch,
        data_rank=layout.data_rank(dist.get_rank()),
        data_ranks=layout.data_ranks,
        vocab_size=config.spec().vocab_size,
        within_documents=True,
        references=lambda i: [0.0] * len(samples.answers(i)),
    )
    documents: list[list[int]] = []

    def noted() -> Iterator[Batch]:
        for batch in batches:
            phases.begin("evaluation", 0)  # a limit of its own for each micro-batch, as the whole pass takes long
            indices = [i for i in batch.sample_ids_AB.flatten().tolist() if i != PADDING_ID]
            documents.append([document for i in indices for document in samples.answers(i)])
            yield batch

    results: list[Tensor] = work.document_log_probs(noted())
    phases.end("evaluation")
    for numbers, values_D in zip(documents, results, strict=True):
        total[torch.tensor(numbers, dtype=torch.int64, device=work.device)] = values_D
    log_probs: np.ndarray = work.model.sum_over_samples(total).cpu().numpy()
    return log_probs


def _read(path: Path, fingerprint: str, step: int, splits: Mapping[str, Samples]) -> dict[str, np.ndarray]:
    try:
        with safe_open(path, "np") as file:
            found = (file.metadata() or {}).get("fingerprint")
            values = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - no dict
    except FileNotFoundError:
        raise DataError(
            f"{path} is missing: it has the log-probabilities of the model before the first step, and the checkpoint "
            f"is of step {step}; copy it from the folder of the run that wrote the checkpoint, or start anew"
        ) from None
    except (OSError, SafetensorError) as error:
        raise DataError(f"{path} is damaged ({error}); copy it again, or start the run anew") from None
    if found != fingerprint:
        raise DataError(
            f"{path} is of other data than the run trains on now; prepare the data as before, or start anew"
        )
    for name, samples in splits.items():
        n_answers, n_there = samples.origin(0)[0].n_documents, len(values.get(name, ()))
        if n_there != n_answers:
            split = name.partition("/")[0]
            raise DataError(
                f"{path} has {n_there:,} log-probabilities for the {n_answers:,} answers of the {split} split: the run "
                f"that wrote it did not read the split; "
                + ("set evaluation.samples=0, or start anew" if split == "validation" else "start anew")
            )
    return values
