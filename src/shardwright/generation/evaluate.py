"""Implements `shardwright eval`: the loss and perplexity of a model on prepared data, on any layout."""

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import torch
import torch.distributed as dist

from shardwright.config import load_kept
from shardwright.config.mixture import mixtures_of, name_of, sources_of
from shardwright.config.sections import DataSection
from shardwright.data.batches import evaluation_batches
from shardwright.data.samples import Samples, samples_of
from shardwright.data.shards import open_split
from shardwright.generation.generate import layout_problems
from shardwright.generation.source import Source, open_source
from shardwright.layout.layout import Layout
from shardwright.run_folder import RUN_FILE
from shardwright.system.errors import DataError, InputError
from shardwright.system.files import is_text
from shardwright.training.ranks import ProcessRank, pick_device, place_from_environment, process_group
from shardwright.training.sources import tokenizer_problems, unchecked_tokenizers, weighted_mean
from shardwright.training.step import ForwardBackward
from shardwright.training.weights import CheckpointWeights
from shardwright.verification.ranks import run_ranks


@dataclass(frozen=True)
class EvalRequest:
    """The options of an evaluation. `model`: a run, a checkpoint or a folder of transformers; `data`: a prepared
    folder, whose `split` is evaluated; `samples` None: all sequences. For a run, data (all sources), seq_len and the
    way of making sequences come from its run file unless they are given; otherwise sequences of max_seq_len are packed.
    """

    model: Path
    data: Path | None = None
    split: str = "validation"
    layout: Layout = field(default_factory=Layout)
    seq_len: int | None = None
    samples: int | None = None
    micro_batch: int = 4
    device: str = "auto"
    sequences: Literal["packed", "documents"] | None = None


@dataclass(frozen=True)
class LossEvaluation:
    """`loss`: mean cross-entropy of a predicted token, in nats; several sources are weighted as the run mixes them.
    `perplexity`: its exponential; `n_tokens`: predicted tokens that count; `data`: folders. `remarks`: for the user."""

    loss: float
    perplexity: float
    n_samples: int
    seq_len: int
    n_tokens: int
    data: tuple[str, ...]
    remarks: tuple[str, ...] = ()


@dataclass(frozen=True)
class _EvaluationTask:
    """The data of an evaluation, and the step of the run at which the model was saved."""

    data: DataSection
    seq_len: int
    step: int = 0

    @property
    def folders(self) -> dict[str, Path]:
        return {name_of(source): Path(source.path) for source in sources_of(self.data)}

    def samples(self, split: str) -> dict[str, Samples]:
        """Return the samples of each source. Raises DataError with every problem."""
        problems, result = [], {}
        for name, folder in self.folders.items():
            try:
                result[name] = samples_of(open_split(folder, split), self.data, self.seq_len)
            except DataError as error:
                problems += error.problems
        if problems:
            raise DataError(*problems)
        return result


def _task(request: EvalRequest, source: Source) -> _EvaluationTask:
    folder = source.weights.path
    of_run = isinstance(source.weights, CheckpointWeights) and (folder / RUN_FILE).is_file()
    run = load_kept(folder) if of_run else None
    if run is None and request.data is None:
        raise InputError(
            f"--data is missing: {request.model} is not a run; name a folder of `shardwright data prepare`"
        )
    data = DataSection() if run is None else run.data
    if request.data is not None:
        if not is_text(str(request.data)):
            raise InputError(f"--data {request.data}: the name of the folder is not UTF-8 text; rename it")
        data = data.model_copy(update={"path": str(request.data), "sources": [], "stages": []})
    if request.sequences is not None:
        packed = {"attention": "sequence", "positions": "sequence", "mask_boundaries": False}
        data = data.model_copy(update={"sequences": request.sequences, **packed})
    seq_len = request.seq_len or (source.spec.max_seq_len if run is None else run.batch.schedule.longest.seq_len)
    step = source.weights.manifest.progress.step if isinstance(source.weights, CheckpointWeights) else 0
    return _EvaluationTask(data, seq_len, step)


def evaluate(request: EvalRequest) -> LossEvaluation | None:
    """Evaluate a model; return None on every rank of torchrun or srun except the first.

    Raises InputError, with every problem at once, before anything is computed, and for data without a target token.
    """
    place = place_from_environment()
    source, layout = open_source(request.model), request.layout
    task = _task(request, source)
    problems = layout_problems(source.spec, layout, place, task.seq_len)
    if task.seq_len > source.spec.max_seq_len:
        problems.append(
            f"--seq-len {task.seq_len} is longer than max_seq_len={source.spec.max_seq_len} of the model; valid: 1 to "
            f"{source.spec.max_seq_len}"
        )
    samples: dict[str, Samples] = {}
    try:
        samples = task.samples(request.split)
        for source_samples in samples.values():
            source_samples.origin(0)[0].manifest.check_vocabulary(source.spec.vocab_size)
        if request.data is not None:
            data = {f"--data {request.data}": request.data}
            problems += tokenizer_problems(data, {"the model": source.weights.path})
    except DataError as error:
        problems += error.problems
    if problems:
        raise InputError(*problems)
    if place is None and layout.world_size > 1:
        sums = run_ranks(_on_cpu, layout.world_size, request, task)[0]
    else:
        layout.check_world(place.world_size if place else 1)
        device = pick_device(request.device, place or ProcessRank())
        with process_group(place or ProcessRank(), device):
            sums = _sums(request, task, device)
        if place is not None and place.rank != 0:
            return None
    n_samples = sum(min(len(s), request.samples or len(s)) for s in samples.values())
    folders = tuple(map(str, task.folders.values()))
    losses = {name: total / n for name, (total, n) in zip(samples, sums, strict=True) if n}
    if not losses:
        raise InputError(
            f"none of the {n_samples:,} sequences of the {request.split} split in {', '.join(folders)} has a token "
            f"that counts in the loss, so there is no perplexity"
        )
    loss = weighted_mean(mixtures_of(task.data), list(samples), task.step, losses)
    n_tokens = int(sum(n for _, n in sums))
    remarks = unchecked_tokenizers({f"{request.model}": source.weights.path}) if request.data is not None else []
    perplexity = math.exp(min(loss, 700.0))
    return LossEvaluation(loss, perplexity, n_samples, task.seq_len, n_tokens, folders, tuple(remarks))


def _on_cpu(request: EvalRequest, task: _EvaluationTask) -> list[tuple[float, float]]:
    """Compute `_sums` on one rank that was forked here."""
    return _sums(request, task, torch.device("cpu"))


def _sums(request: EvalRequest, task: _EvaluationTask, device: torch.device) -> list[tuple[float, float]]:
    """Return the summed loss and the number of target tokens of each source, equal on every rank."""
    source, layout = open_source(request.model), request.layout
    model = source.on_rank(layout, device, task.seq_len)
    work = ForwardBackward(model, device=device, seed=0, restart_positions=task.data.positions == "document")
    result = []
    for samples in task.samples(request.split).values():
        batches = evaluation_batches(
            samples,
            micro_batch=request.micro_batch,
            data_rank=layout.data_rank(dist.get_rank()),
            data_ranks=layout.data_ranks,
            vocab_size=source.spec.vocab_size,
            within_documents=task.data.attention == "document",
            max_samples=request.samples,
        )
        sums = work.evaluation_sums(batches)
        result.append((float(sums[0, 0]), float(sums[1, 0])))
    return result
