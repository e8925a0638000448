"""Implements `shardwright eval`: the loss and perplexity of a model on prepared data, on any layout; of a run on pairs
of answers, the loss of the pairs and their metrics."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Literal

import numpy as np
import torch
import torch.distributed as dist

from shardwright.config import load_kept
from shardwright.config.mixture import mixtures_of, name_of, sources_of
from shardwright.config.sections import NO_PREFERENCE, DataSection, PreferenceSection, TokenCache
from shardwright.data.batches import evaluation_batches
from shardwright.data.samples import PairSamples, Samples, samples_of
from shardwright.data.shards import data_folder, open_split, open_split_of_run
from shardwright.generation.generate import layout_problems
from shardwright.generation.ranks import run_on_layout
from shardwright.generation.source import Source, open_source
from shardwright.layout.layout import Layout
from shardwright.parallel.preference import METRICS
from shardwright.runs.folder import REFERENCE, RUN_FILE, run_of_checkpoint
from shardwright.split.rules import pair_loss_problems
from shardwright.system.errors import DataError, InputError, collecting
from shardwright.system.files import is_text
from shardwright.training.forward_backward import ForwardBackward
from shardwright.training.ranks import place_from_environment
from shardwright.training.references import read_references
from shardwright.training.sources import tokenizer_problems, unchecked_tokenizers, values_of_answers, weighted_mean
from shardwright.training.weights import CheckpointWeights


@dataclass(frozen=True)
class EvalRequest:
    """The options of an evaluation. `model`: a run, a checkpoint or a folder of transformers; `data`: a prepared
    folder, whose `split` is evaluated; `samples` None: all sequences. For a run, data (all sources), seq_len and the
    way of making sequences come from its run file unless they are given; otherwise sequences of max_seq_len are packed.
    `loss`: "tokens", the next token; "pairs", the loss of a run on pairs; "auto": the loss of the run, or tokens.
    """

    model: Path
    data: str | None = None
    split: str = "validation"
    layout: Layout = field(default_factory=Layout)
    seq_len: int | None = None
    samples: int | None = None
    micro_batch: int = 4
    device: str = "auto"
    sequences: Literal["packed", "documents"] | None = None
    loss: Literal["auto", "tokens", "pairs"] = "auto"


@dataclass(frozen=True)
class LossEvaluation:
    """`loss`: mean cross-entropy of a predicted token, in nats; several sources are weighted as the run mixes them.
    `perplexity`: its exponential; `n_tokens`: predicted tokens that count; `data`: folders. `remarks`: for the user.

    Of pairs, `loss` is the mean loss of the run's `kind` over `n_pairs`, in `unit`, `margin` and `accuracy` are the
    means of the other numbers of a step (`parallel.preference.METRICS`), and there are no perplexity and `n_tokens`."""

    loss: float
    perplexity: float | None
    n_samples: int
    seq_len: int
    n_tokens: int | None
    data: tuple[str, ...]
    remarks: tuple[str, ...] = ()
    unit: str = NO_PREFERENCE.loss_unit
    kind: str = NO_PREFERENCE.kind
    n_pairs: int | None = None
    margin: float | None = None
    accuracy: float | None = None


@dataclass(frozen=True)
class _EvaluationTask:
    """The data of an evaluation, and the step of the run at which the model was saved. For the loss of pairs, its kind
    and the reference's values by source."""

    data: DataSection
    seq_len: int
    step: int = 0
    preference: PreferenceSection = NO_PREFERENCE
    references: Mapping[str, np.ndarray] | None = None

    @property
    def compares_pairs(self) -> bool:
        return self.preference.kind != "none"

    @property
    def folders(self) -> dict[str, str]:
        return {name_of(source): source.path for source in sources_of(self.data)}

    def samples(self, split: str) -> dict[str, Samples]:
        """Return the samples of each source. Raises DataError with every problem."""
        problems: list[str] = []
        result: dict[str, Samples] = {}
        for name, folder in self.folders.items():
            with collecting(problems, DataError):
                result[name] = samples_of(open_split_of_run(folder, split, self.data), self.data, self.seq_len)
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
        data = data.model_copy(update={"path": str(request.data), "sources": [], "stages": [], "order": "all"})
    if any(_has_pairs(source.path, data.token_cache, request.split) for source in sources_of(data)):
        if request.sequences is not None:
            raise InputError(
                f"--sequences {request.sequences}: the data are pairs of answers, which are documents of one sequence; "
                f"leave it out"
            )
        within_documents = {"attention": "document", "positions": "document", "mask_boundaries": False}
        data = data.model_copy(update={"sequences": "packed", **within_documents})
    if request.sequences is not None:
        packed = {"attention": "sequence", "positions": "sequence", "mask_boundaries": False}
        data = data.model_copy(update={"sequences": request.sequences, **packed})
    seq_len = request.seq_len or (source.spec.max_seq_len if run is None else run.batch.schedule.longest.seq_len)
    step = source.weights.manifest.progress.step if isinstance(source.weights, CheckpointWeights) else 0
    preference = NO_PREFERENCE if run is None or request.loss == "tokens" else run.preference
    if request.loss == "pairs" and preference.kind == "none":
        what = "is no run" if run is None else "is a run with preference.kind='none'"
        raise InputError(
            f"--loss pairs: {request.model} {what}; valid: the folder or a checkpoint of a run with [preference]"
        )
    return _EvaluationTask(data, seq_len, step, preference)


def _has_pairs(path: str, cache: TokenCache, split: str) -> bool:
    """Return whether a prepared folder has pairs; False for a folder that cannot be read, whose problems are reported
    with the others."""
    try:
        return bool(open_split(path, split, cache).manifest.pairs)
    except DataError:
        return False


def _for_data(task: _EvaluationTask, request: EvalRequest, samples: dict[str, Samples]) -> _EvaluationTask:
    """Return the task, of the next token if the data are no pairs. Raises DataError if the loss of pairs was asked."""
    others = [name for name, samples_of_name in samples.items() if not isinstance(samples_of_name, PairSamples)]
    if not task.compares_pairs or not others:
        return task
    if request.loss == "pairs":
        raise DataError(f"--loss pairs: {task.folders[others[0]]} has no pairs; prepare them with --format preference")
    return replace(task, preference=NO_PREFERENCE)


def _with_references(task: _EvaluationTask, split: str, source: Source, samples: dict[str, Samples]) -> _EvaluationTask:
    """Return the task with the reference's values of the samples, from the folder of the run. Raises DataError."""
    if not task.preference.has_reference:
        return task
    assert isinstance(source.weights, CheckpointWeights)
    run, data = run_of_checkpoint(source.weights.path), source.weights.manifest.data
    fingerprint = " ".join(samples_of_name.origin(0)[0].manifest.fingerprint for samples_of_name in samples.values())
    splits = {f"{split}/{n}": samples_of_name for n, samples_of_name in enumerate(samples.values())}
    digest = None if data is None else data.get("reference")
    way_out = "measure the next token with --loss tokens"
    if run is None:
        raise DataError(
            f"{source.weights.path} is in no folder of a run, where {REFERENCE} would be; name the run, or {way_out}"
        )
    values = read_references(run / REFERENCE, fingerprint, digest, splits, task.step, way_out)
    by_source = dict(zip(samples, map(values.__getitem__, splits), strict=True))
    return replace(task, references=by_source)


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
    with collecting(problems, DataError):
        samples = task.samples(request.split)
        for source_samples in samples.values():
            source_samples.origin(0)[0].manifest.check_vocabulary(source.spec.vocab_size)
        task = _with_references(_for_data(task, request, samples), request.split, source, samples)
        if request.data is not None:
            data = {f"--data {request.data}": data_folder(request.data, task.data.token_cache)}
            problems += tokenizer_problems(data, {"the model": source.weights.path})
    if task.compares_pairs:
        problems += pair_loss_problems(task.preference.kind, source.spec, layout)
    if problems:
        raise InputError(*problems)
    sums: Sums = run_on_layout(layout, request.device, _sums, request, task)
    if place is not None and place.rank != 0:
        return None
    n_samples = sum(min(len(s), request.samples or len(s)) for s in samples.values())
    folders = tuple(task.folders.values())
    means = {
        name: [total / n for total, n in totals] for name, totals in zip(samples, sums, strict=True) if totals[0][1]
    }
    if not means:
        raise InputError(
            f"none of the {n_samples:,} sequences of the {request.split} split in {', '.join(folders)} has a token "
            f"that counts in the loss, so there is no perplexity"
        )
    mixtures = mixtures_of(task.data)
    loss, *metrics = (
        weighted_mean(mixtures, list(samples), task.step, {name: of_source[at] for name, of_source in means.items()})
        for at in range(len(sums[0]))
    )
    counted = int(sum(totals[0][1] for totals in sums))
    remarks = unchecked_tokenizers({f"{request.model}": source.weights.path}) if request.data is not None else []
    if not task.compares_pairs:
        perplexity = math.exp(min(loss, 700.0))
        return LossEvaluation(loss, perplexity, n_samples, task.seq_len, counted, folders, tuple(remarks))
    named = dict(zip(METRICS, metrics, strict=True))
    return LossEvaluation(
        *(loss, None, n_samples, task.seq_len, None, folders),
        remarks=(*remarks, "--loss tokens measures the next token of the answers instead, with their perplexity"),
        unit=task.preference.loss_unit,
        kind=task.preference.kind,
        n_pairs=counted,
        margin=named["margin"],
        accuracy=named["accuracy"],
    )


Sums = list[list[tuple[float, float]]]
"""For each source, the sums of `ForwardBackward.evaluation_sums`, each with its number of tokens or pairs."""


def _sums(request: EvalRequest, task: _EvaluationTask, device: torch.device) -> Sums:
    """Return the sums of each source, equal on every rank."""
    source, layout = open_source(request.model), request.layout
    model = source.on_rank(layout, device, task.seq_len)
    restarts = task.data.positions == "document"
    work = ForwardBackward(model, device=device, seed=0, restart_positions=restarts, preference=task.preference)
    result = []
    for name, samples in task.samples(request.split).items():
        values = None if task.references is None else task.references[name]
        batches = evaluation_batches(
            samples,
            micro_batch=request.micro_batch,
            data_rank=layout.data_rank(dist.get_rank()),
            data_ranks=layout.data_ranks,
            vocab_size=source.spec.vocab_size,
            within_documents=task.data.attention == "document",
            references=partial(values_of_answers, values, samples) if task.compares_pairs else None,
            max_samples=request.samples,
        )
        sums, counts = work.evaluation_sums(batches).tolist()
        n_losses = len(sums) if task.compares_pairs else 1
        result.append([*zip(sums, counts, strict=True)][:n_losses])
    return result
