"""What `shardwright eval` does: the loss and perplexity of a model on prepared data, on any layout."""

import math
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.distributed as dist

from shardwright.data.batches import evaluation_batches
from shardwright.data.samples import PackedSamples
from shardwright.data.shards import open_split
from shardwright.errors import DataError, InputError
from shardwright.generation.generate import layout_problems
from shardwright.generation.source import open_source
from shardwright.layout import Layout
from shardwright.training.ranks import Place, pick_device, place_from_environment, process_group
from shardwright.training.step import ForwardBackward
from shardwright.verification.ranks import run_ranks


@dataclass(frozen=True)
class EvalRequest:
    """What is asked for. `model`: a run, a checkpoint or a folder of transformers; `data`: a prepared folder, of which
    `split` is evaluated; `seq_len` None: max_seq_len of the model; `samples` None: all sequences."""

    model: Path
    data: Path
    split: str = "validation"
    layout: Layout = field(default_factory=Layout)
    seq_len: int | None = None
    samples: int | None = None
    micro_batch: int = 4
    device: str = "auto"


@dataclass(frozen=True)
class Evaluation:
    """`loss`: mean cross-entropy of a predicted token, in nats; `perplexity`: its exponential."""

    loss: float
    perplexity: float
    n_samples: int
    seq_len: int

    @property
    def n_tokens(self) -> int:
        """Tokens that were predicted."""
        return self.n_samples * self.seq_len


def evaluate(request: EvalRequest) -> Evaluation | None:
    """Evaluate a model; None on a rank other than the first of those that torchrun or srun has started.

    Sequences are packed, as training has them by default: each predicts `seq_len` tokens. Raises InputError, with every
    problem at once, before anything is computed.
    """
    place = place_from_environment()
    source, layout = open_source(request.model), request.layout
    seq_len = request.seq_len or source.spec.max_seq_len
    problems = layout_problems(source.spec, layout, place, seq_len)
    if seq_len > source.spec.max_seq_len:
        problems.append(
            f"--seq-len {seq_len} is longer than max_seq_len={source.spec.max_seq_len} of the model; give that or less"
        )
    try:
        samples = _samples(request, seq_len)
        manifest = samples.split.manifest
        manifest.check_vocabulary(source.spec.vocab_size)
        if source.tokenizer_sha256() not in (None, manifest.tokenizer_sha256):
            problems.append(
                f"--data {request.data} was prepared with another tokenizer than that of the model, so its token ids "
                f"mean other texts; prepare it again with --tokenizer and the tokenizer.json of the model"
            )
    except DataError as error:
        problems += error.problems
    if problems:
        raise InputError(*problems)
    if place is None and layout.world_size > 1:
        loss = run_ranks(_on_cpu, layout.world_size, request, seq_len)[0]
    else:
        layout.check_world(place.world_size if place else 1)
        device = pick_device(request.device, place or Place())
        with process_group(place or Place(), device):
            loss = _loss(request, seq_len, device)
        if place is not None and place.rank != 0:
            return None
    n_samples = min(len(samples), request.samples or len(samples))
    return Evaluation(loss, math.exp(min(loss, 700.0)), n_samples, seq_len)


def _samples(request: EvalRequest, seq_len: int) -> PackedSamples:
    return PackedSamples(open_split(request.data, request.split), seq_len)


def _on_cpu(request: EvalRequest, seq_len: int) -> float:
    """One rank that was forked here."""
    return _loss(request, seq_len, torch.device("cpu"))


def _loss(request: EvalRequest, seq_len: int, device: torch.device) -> float:
    """The mean over all target tokens, equal on every rank."""
    source, layout = open_source(request.model), request.layout
    model = source.on_rank(layout, device, seq_len)
    batches = evaluation_batches(
        _samples(request, seq_len),
        micro_batch=request.micro_batch,
        data_rank=layout.data_rank(dist.get_rank()),
        data_ranks=layout.data_ranks,
        vocab_size=source.spec.vocab_size,
        max_samples=request.samples,
    )
    return float(ForwardBackward(model, device=device, seed=0).evaluate(batches)[0])
