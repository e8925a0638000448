"""A model on the ranks of a layout, for a user's own training loop."""

import atexit
import os
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardwright.api.arguments import as_spec, check_layout
from shardwright.config import OptimizerSection
from shardwright.data.batches import Batch
from shardwright.generation.continuous import Batcher
from shardwright.generation.engine import LayoutEngine
from shardwright.generation.sampling import Sampling, sampling_problems
from shardwright.layout.layout import Layout
from shardwright.model.expert_choices import choice_problems
from shardwright.model.modules import row_of
from shardwright.model.quantised import fill_box
from shardwright.model.row import Row
from shardwright.model.spec import ModelSpec
from shardwright.model.transformer import Transformer
from shardwright.parallel.apply import apply
from shardwright.parallel.boxes import local_box
from shardwright.parallel.objects import gathered
from shardwright.parallel.stored import gather_values
from shardwright.split.rules import TokenCall, batch_invariance_problems, expert_call_problems, token_call_problems
from shardwright.split.rules import problems as split_problems
from shardwright.split.stages import schedule_problems
from shardwright.system.errors import InputError, LayoutError, checked_call, checked_constructor
from shardwright.training.forward_backward import ForwardBackward
from shardwright.training.optimizer import parameter_groups
from shardwright.training.ranks import ProcessRank, join, pick_device, place_from_environment


@checked_constructor(InputError)
@dataclass(frozen=True)
class Continuation:
    """The tokens after a prompt, and the log-probability of each in nats, by the model itself, before temperature,
    top-k and top-p. `experts`: if they were recorded, the experts of each token of prompt and continuation except the
    last, in each layer with experts, int64 (tokens, layers, top_k)."""

    tokens: tuple[int, ...]
    log_probs: tuple[float, ...]
    experts: Tensor | None = field(default=None, compare=False)


class DistributedModel:
    """This rank's part of a model; made by `parallelize`.

    A step of a training loop is three calls, on every rank:

        loss = model.forward_backward(tokens, targets)
        model.clip_grad_norm(1.0)
        optimizer.step()

    Attributes: `spec`, `layout`, `device`. Ranks of the same data rank (along tp, cp and pp) receive the same
    sequences; ranks of different data ranks receive different sequences.
    """

    def __init__(self, work: ForwardBackward, *, compiled: bool = False) -> None:
        """`work`: contains the parallel model, on its device; `compiled`: whether its blocks are compiled."""
        self._work, self._model, self._compiled = work, work.model, compiled
        self.spec, self.layout, self.device = self._model.spec, self._model.layout, work.device
        self._steps = 0
        self._replica: dist.ProcessGroup | None = None
        """The ranks that generate the same sequences, after the first `generate`."""
        self._checked: set[tuple[int, int, int]] = set()
        """Valid combinations of the number of sequences, the number of tokens and the micro-batch size."""

    @property
    def rank(self) -> int:
        """Return the number of this process among all ranks of the layout."""
        return dist.get_rank()

    @property
    def data_rank(self) -> int:
        """Return the index of the part, out of `layout.data_ranks`, of a global batch that this rank must read."""
        return self.layout.data_rank(self.rank)

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield (name in the whole model, parameter) for this rank's parameters: whole or a DTensor shard."""
        yield from self._model.named_parameters.items()

    def parameters(self) -> Iterator[nn.Parameter]:
        """Yield the parameters of `named_parameters`, for an optimizer."""
        yield from self._model.named_parameters.values()

    @checked_call
    def parameter_groups(self, weight_decay: float = 0.1) -> list[dict[str, Any]]:
        """Return groups for a PyTorch optimizer: `weight_decay` for matrices and embeddings, 0 for norms and biases.
        Each DeviceMesh has its own group, because one fused update cannot take parameters of two meshes.

        Pass these groups, and not `parameters()`, to an optimizer with `foreach` or `fused` set.
        """
        groups = parameter_groups(self._model.named_parameters, self.spec, OptimizerSection(weight_decay=weight_decay))
        return [{"params": group["params"], "weight_decay": group["weight_decay"]} for group in groups]

    @checked_call
    def forward_backward(
        self,
        tokens: Tensor,
        targets: Tensor,
        *,
        weights: Tensor | None = None,
        micro_batch: int | None = None,
        experts: Tensor | None = None,
    ) -> Tensor:
        """Compute the loss and the gradients of one global batch, with gradient accumulation over micro-batches.

        `tokens`, `targets`: integers of shape (B, T), the B sequences of T tokens of this data rank. B is the same on
        every rank, and the global batch is B x `layout.data_ranks` sequences. Ranks of cp select their own tokens. A
        target of -100 is not counted. `weights`: floats of shape (B, T) that multiply the cross-entropy of each target,
        for instance its advantage; the sum is still divided by the number of targets. `micro_batch`: sequences that a
        rank runs at a time; by default B, or 1 with pp. `experts`: integers of shape (B, T, L, top_k) for L
        layers with experts, the experts of each token instead of the router's choice (-1: the router's), as `generate`
        records them.
        `.grad` of the parameters is replaced, not added to: `zero_grad` is not needed.

        Returns the loss of the global batch per target token, a scalar, equal on every rank. Raises InputError for
        invalid shapes, LayoutError if the layout cannot split T or its schedule cannot run B / micro_batch
        micro-batches.
        """
        batch = self._batch(tokens, targets, self._default(micro_batch, tokens), weights, experts)
        self._model.after_change()  # parameters that the optimizer has changed since
        self._model.forget_gradients()
        loss_part, *_ = self._work.forward_backward(batch, self._steps)
        self._model.learn_from_load()
        self._steps += 1
        return self._model.sum_over_losses(loss_part.detach())

    @checked_call
    def clip_grad_norm(self, max_norm: float = float("inf")) -> Tensor:
        """Scale the gradients so that their global norm is at most `max_norm`. Returns the norm before scaling, a
        scalar of the whole model, equal on every rank. `torch.nn.utils.clip_grad_norm_` would return the norm of a
        shard."""
        return self._work.clip(max_norm)

    @checked_call
    def evaluate(self, tokens: Tensor, targets: Tensor, *, micro_batch: int = 1) -> Tensor:
        """Return the loss per target token, without gradients and dropout; arguments and errors as in
        `forward_backward`."""
        batch = self._batch(tokens, targets, micro_batch)
        self._model.after_change()
        return self._work.evaluate([batch])[0]

    @checked_call
    def log_probs(
        self, tokens: Tensor, targets: Tensor, *, micro_batch: int | None = None, experts: Tensor | None = None
    ) -> Tensor:
        """Return the log-probability of each target given the tokens before it, by the forward pass of training without
        dropout: float64 of shape (B, T), in nats, 0 for a target of -100. Arguments and errors as in
        `forward_backward`, and LayoutError for loss_chunk_tokens above 0 and for experts that are drawn
        (moe.force_balance). Ranks of one data rank have equal results."""
        self._check_call("log_probs")
        batch = self._batch(tokens, targets, self._default(micro_batch, tokens), experts=experts)
        self._model.after_change()
        return self._work.token_log_probs(batch)

    @checked_call
    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        max_tokens: int,
        *,
        temperature: float | None = 1.0,
        top_k: int = 0,
        top_p: float = 1.0,
        seed: int = 0,
        ends: Collection[int] = (),
        batch_size: int = 64,
        record_experts: bool = False,
    ) -> list[Continuation]:
        """Continue prompts with the current parameters, token by token with a cache, on the layout of training.

        `prompts`: token ids, the prompts of this data rank; another data rank may have another number of them. A
        continuation has `max_tokens` tokens, fewer if one of `ends` is drawn, which it then contains, or the sequence
        reaches `max_seq_len`. `temperature` 0 or None: the most probable token; `top_k`, `top_p`: draw from the
        most probable ones. A draw depends on `seed`, the data rank, the number of the prompt and the position alone.
        `batch_size`: sequences that this data rank runs at a time. `record_experts`: return the experts of each token.

        Raises InputError on every rank, with the problems of all data ranks: a prompt that is empty, too long or has
        ids beyond the vocabulary, and numbers that nothing can be drawn with. Raises LayoutError for a layout or model
        without this call: loss_chunk_tokens above 0, a schedule with several stages on a rank (virtual_stages above 1,
        zb-v, dualpipe, dualpipe-v), moe.capacity_factor above 0, moe.force_balance. Every rank calls this.
        """
        self._check_call("generate")
        if record_experts:
            self._check_experts()
        problems = self._prompt_problems(prompts) + sampling_problems(temperature, top_k, top_p)
        if max_tokens < 1 or batch_size < 1:
            problems.append(f"max_tokens={max_tokens} and batch_size={batch_size}: both have to be 1 or more")
        if beyond := [end for end in ends if not 0 <= end < self.spec.vocab_size]:
            problems.append(f"ends={beyond}: ids of 0 to {self.spec.vocab_size - 1} are needed")
        longest = self._longest(problems, max(map(len, prompts), default=1) + max_tokens)
        self._model.after_change()
        n_slots = max(1, min(batch_size, len(prompts)))
        engine = LayoutEngine(
            self._model, self.device, n_slots, longest, replica=self._replica, record_experts=record_experts
        )
        self._replica = engine.replica
        try:
            sampling = Sampling(temperature, top_k, top_p, seed)
            batcher = Batcher(engine, sampling, self.spec.max_seq_len, frozenset(ends), log_probs={})
            batcher.experts = {} if record_experts else None
            numbered = {n * self.layout.data_ranks + self.data_rank: prompt for n, prompt in enumerate(prompts)}
            tokens, log_probs = batcher.complete(numbered, max_tokens), batcher.log_probs or {}
        finally:
            engine.close()
        experts = {n: torch.cat(parts) for n, parts in (batcher.experts or {}).items()}
        return [Continuation(tuple(tokens[n]), tuple(log_probs[n]), experts.get(n)) for n in numbered]

    @checked_call
    @torch.no_grad()
    def full_state_dict(self) -> dict[str, Tensor]:
        """Return every parameter of the whole model by name, on this rank's device, to load into a `Transformer` of one
        process. A collective: every rank calls it, and needs memory for the whole model."""
        self._model.after_change()
        parameters = self._model.named_parameters
        dtype = next(parameter.dtype for parameter in parameters.values() if parameter.is_floating_point())
        local = {
            name: gather_values(row_of(self.spec, name), parameter, dtype) for name, parameter in parameters.items()
        }
        group = self._model.groups.pp
        if group is None:
            return local
        result = {}
        for name in sorted(self._model.held_on):
            owner = min(self._model.held_on[name])
            shape = row_of(self.spec, name).shape
            tensor = local[name] if name in local else torch.empty(shape, dtype=dtype, device=self.device)
            dist.broadcast(tensor, dist.get_global_rank(group, owner), group=group)
            result[name] = tensor
        return result

    def _prompt_problems(self, prompts: Sequence[Sequence[int]]) -> list[str]:
        most, n_ids = self.spec.max_seq_len - 1, self.spec.vocab_size
        return [
            f"prompt {number} has {len(prompt)} tokens; needed: 1 to {most} (max_seq_len - 1), with ids of 0 to "
            f"{n_ids - 1}"
            for number, prompt in enumerate(prompts)
            if not 0 < len(prompt) <= most or not 0 <= min(prompt) <= max(prompt) < n_ids
        ]

    def _longest(self, problems: list[str], n_tokens: int) -> int:
        """Return the tokens of the longest sequence of any data rank, at most max_seq_len. Raises InputError on every
        rank if one has `problems`: the others would wait for it. A collective."""
        by_rank = gathered((problems, n_tokens), tuple[list[str], int])
        by_data_rank = {self.layout.data_rank(rank): of_rank for rank, (of_rank, _) in enumerate(by_rank)}
        if any(by_data_rank.values()):
            shared = [problem for problem in problems if all(problem in by_rank for by_rank in by_data_rank.values())]
            own = [
                f"data rank {data_rank}: {problem}"
                for data_rank, of_rank in by_data_rank.items()
                for problem in of_rank
                if problem not in shared
            ]
            raise InputError(*shared, *own)
        return min(self.spec.max_seq_len, max(n for _, n in by_rank))

    def _check_call(self, call: TokenCall) -> None:
        """Raise LayoutError for a call that this model or layout does not have."""
        if problems := token_call_problems(self.spec, self.layout, call):
            raise LayoutError(*problems)

    def _default(self, micro_batch: int | None, tokens: Tensor) -> int:
        return micro_batch or (1 if self.layout.pp > 1 else len(tokens))

    def _check_experts(self, experts: Tensor | None = None, shape: Sequence[int] = ()) -> None:
        """Raise InputError or LayoutError for choices of experts that cannot be recorded or replayed."""
        if problems := expert_call_problems(self.spec, self.layout, self._compiled):
            raise LayoutError(*problems)
        if experts is None:
            return
        if experts.shape[:-2] != shape:
            raise InputError(
                f"experts of shape {tuple(experts.shape)}: ({', '.join(map(str, shape))}, layers with experts, top_k) "
                f"is needed"
            )
        if problems := choice_problems(self.spec, experts):
            raise InputError(*(f"experts: {problem}" for problem in problems))

    def _batch(
        self,
        tokens: Tensor,
        targets: Tensor,
        micro_batch: int,
        weights: Tensor | None = None,
        experts: Tensor | None = None,
    ) -> Batch:
        if tokens.dim() != 2 or tokens.shape != targets.shape:
            raise InputError(
                f"tokens of shape {tuple(tokens.shape)} and targets of shape {tuple(targets.shape)}: both have to be "
                f"(sequences, tokens of a sequence)"
            )
        if weights is not None and (weights.shape != tokens.shape or not weights.is_floating_point()):
            raise InputError(
                f"weights of shape {tuple(weights.shape)} and type {weights.dtype}: floats of the shape of tokens, "
                f"{tuple(tokens.shape)}, are needed"
            )
        if weights is not None:
            self._check_call("weights")
        if experts is not None:
            self._check_experts(experts, tokens.shape)
        n_sequences, seq_len = tokens.shape
        if (n_sequences, seq_len, micro_batch) not in self._checked:
            self._check(n_sequences, seq_len, micro_batch)
        first = (self._steps * self.layout.data_ranks + self.data_rank) * n_sequences
        return Batch.from_sequences(
            tokens,
            targets,
            torch.arange(first, first + n_sequences),
            micro_batch,
            weights_BT=weights,
            experts_BTLK=experts,
        )

    def _check(self, n_sequences: int, seq_len: int, micro_batch: int) -> None:
        """Raise InputError or LayoutError for sizes that the layout cannot run."""
        if not n_sequences or micro_batch < 1 or n_sequences % micro_batch:
            raise InputError(f"micro_batch={micro_batch} does not divide the {n_sequences} sequences of a rank")
        problems = split_problems(self.spec, self.layout, seq_len) + schedule_problems(
            self.layout, n_sequences // micro_batch
        )
        if seq_len > self.spec.max_seq_len:
            problems.append(f"sequences of {seq_len} tokens are longer than max_seq_len={self.spec.max_seq_len}")
        if problems:
            raise LayoutError(*problems)
        self._checked.add((n_sequences, seq_len, micro_batch))


@checked_call
def parallelize(
    model: ModelSpec | Transformer | str,
    layout: Layout | None = None,
    *,
    seq_len: int | None = None,
    seed: int = 0,
    device: str = "auto",
    param_dtype: torch.dtype = torch.float32,
    compute_dtype: torch.dtype | None = None,
    compile: bool = False,
    batch_invariant: bool = False,
) -> DistributedModel:
    """Put a model on the ranks of a layout. Every rank calls this function with the same arguments.

    `model`: a ModelSpec or the name of a preset, whose initial values are made from `seed`, equal under every layout;
    or a Transformer, whose values are used and must be the same on every rank. `layout`: one rank by default.
    `seq_len`: tokens of a sequence, for which pipeline stages are balanced; the model's `max_seq_len` by default.
    `device`: "cpu", "cuda" or "auto". `param_dtype`: type of parameters, gradients and optimizer states.
    `compute_dtype`: type of matmuls, `param_dtype` by default. `compile`: compile each block with torch.compile.
    `batch_invariant`: `log_probs` and `generate` compute numbers that are equal in each bit, whatever the other
    sequences of a call are; it is slower, and excludes `compile`, latent and linear attention, cp, and tp above 2.

    If no process group exists, this function joins one: of one process, or under torchrun and srun of the processes
    that they started; with gloo on CPU and NCCL on GPUs.

    Raises LayoutError with all problems at once if the number of processes is not the layout's number of ranks, or if
    the layout cannot split the model. Raises ConfigError for an unknown preset.
    """
    given = model if isinstance(model, Transformer) else None
    spec = model.spec if isinstance(model, Transformer) else as_spec(model, ", a Transformer")
    layout = Layout() if layout is None else layout
    check_layout(layout)
    problems = [*spec.problems(), *split_problems(spec, layout, seq_len or spec.max_seq_len)]
    problems += _mode_problems(spec, layout, compile, batch_invariant)
    if problems:
        raise LayoutError(*problems)
    place = _place()
    layout.check_world(place.world_size)
    where = pick_device(device, place)
    if not dist.is_initialized():
        join(place, where)
        atexit.register(_leave)
    parallel = apply(
        spec,
        layout,
        where,
        seed=seed,
        param_dtype=param_dtype,
        compute_dtype=compute_dtype or param_dtype,
        compile_blocks=compile,
        seq_len=seq_len,
        batch_invariant=batch_invariant,
    )
    if given is not None:
        values = dict(given.named_parameters())
        for name, parameter in parallel.named_parameters.items():
            _fill(row_of(spec, name), parameter, values[name])
        parallel.after_change()
    return DistributedModel(ForwardBackward(parallel, device=where, seed=seed, compile_loss=compile), compiled=compile)


def _mode_problems(spec: ModelSpec, layout: Layout, compile: bool, batch_invariant: bool) -> Iterator[str]:
    """Yield the problems of the layout and the modes in a training loop outside of the package."""
    if layout.offload_optimizer != "none":
        yield (
            f"layout.offload_optimizer={layout.offload_optimizer!r}: the optimizer of a loop of your own keeps its "
            f"states itself; leave it out (`train` and `verify` have it)"
        )
    if batch_invariant:
        yield from batch_invariance_problems(spec, layout)
        if compile:
            yield "batch_invariant with compile: a compiled block has one kernel for several operations; leave one out"


def _place() -> ProcessRank:
    """Return the rank of this process in the process group or the launcher's world, or in a world of one."""
    if dist.is_initialized():
        rank = dist.get_rank()
        return ProcessRank(rank, int(os.environ.get("LOCAL_RANK", rank)), dist.get_world_size())
    return place_from_environment() or ProcessRank()


def _leave() -> None:
    """Exit without waiting for other ranks, which may never arrive after an error of one rank."""
    if dist.is_initialized():
        dist.destroy_process_group()


@torch.no_grad()
def _fill(row: Row, parameter: nn.Parameter, values: Tensor) -> None:
    """Copy this rank's part of the whole tensor `values` into a parameter."""
    local, offsets = local_box(parameter)

    def box(at: Sequence[int], shape: Sequence[int]) -> Tensor:
        return values[tuple(slice(first, first + size) for first, size in zip(at, shape, strict=True))]

    fill_box(row, local, offsets, tuple(parameter.shape), box)
