"""Forward passes with a cache, on any layout, by the runner, stages and collectives of training.

A rank of tp has the cache of its heads, a rank of pp the cache of its layers. Tokens of a pass are one sequence of N
tokens to the model, padded to a multiple of the token shards. If cp is above 1, a pass in which one sequence starts has
its tokens sharded over cp; all ranks of cp then keep all keys and values, and later passes run on each of them.

Shapes: N tokens of a pass (padded), t tokens of a shard, W tokens whose logits are wanted, D model, V vocab, v a rank's
rows of the vocabulary.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from shardwright.generation.batch import RaggedBatch
from shardwright.generation.cache import (
    Cache,
    CachedAttention,
    CachedDeltaNet,
    CachedLatentAttention,
    PrefillAttention,
    attend_modules,
)
from shardwright.model.batch_invariant import batch_invariant
from shardwright.model.expert_choices import choice_shape, padded_choices, recorded, replayed
from shardwright.model.latent_attention import LatentAttention
from shardwright.model.linear_attention import GatedDeltaNet
from shardwright.model.spec import ModelSpec
from shardwright.model.transformer import Transformer
from shardwright.parallel.collectives import start_gather_tokens
from shardwright.parallel.loss import gather_vocabulary
from shardwright.parallel.microbatch import Microbatch
from shardwright.parallel.model import ParallelModel
from shardwright.parallel.tensor import VocabularyHead
from shardwright.split.rules import sequence_cuts
from shardwright.split.sequence import spans
from shardwright.system.errors import InputError
from shardwright.training.device import configure_malloc


class GenerationEngine(Protocol):
    """Runs forward passes."""

    cache: Cache
    n_batches: int
    """The maximum passes of one `run`: more than one keeps the stages of a pipeline busy."""
    one_prompt: bool
    """Whether a pass can start only one sequence."""
    record_experts: bool
    """Whether `run` gives each batch the experts of its tokens."""
    in_step: bool
    """Whether `run` needs exactly `n_batches` passes, including empty ones, because other ranks wait for this one."""

    def run(self, batches: Sequence[RaggedBatch]) -> list[Tensor]:
        """Return the logits (W, V) of the wanted tokens of each pass, on a rank that has the head; elsewhere none."""

    def agree(self, choose: Callable[[], Tensor], shape: tuple[int, ...]) -> Tensor:
        """Return the integers of `choose`, on the CPU; one of the ranks that run the same sequences calls it."""

    def anywhere(self, left: bool) -> bool:
        """Return whether any rank has work left."""


class WholeEngine:
    """Runs passes of a whole model on this process alone."""

    n_batches, one_prompt, in_step = 1, False, False

    def __init__(
        self,
        model: Transformer,
        n_slots: int,
        n_positions: int,
        n_ahead: int = 0,
        *,
        batch_invariant: bool = False,
        record_experts: bool = False,
    ) -> None:
        """Sizes of the cache: see `cache.Cache`; `batch_invariant`: see `model/batch_invariant.py`;
        `record_experts`: batches receive the experts of their tokens."""
        self.model, self.batch_invariant, self.record_experts = model.eval(), batch_invariant, record_experts
        self.cache = Cache(n_slots, n_positions, n_ahead)
        if model.embedding.weight.device.type == "cpu":
            configure_malloc()
        check_sequence_len(model.spec, n_positions)
        changes = Replacements()
        _attach(changes, model, self.cache, lambda x: x, lambda x: x)
        _set_sequence_len(changes, model, n_positions)

    @torch.inference_mode()
    def run(self, batches: Sequence[RaggedBatch]) -> list[Tensor]:
        with batch_invariant(self.batch_invariant):
            return [self._run(batch) for batch in batches]

    def agree(self, choose: Callable[[], Tensor], shape: tuple[int, ...]) -> Tensor:
        return choose().cpu()

    def anywhere(self, left: bool) -> bool:
        return left

    def _run(self, batch: RaggedBatch) -> Tensor:
        spec, given = self.model.spec, batch.replayed_NLK
        experts = None if given is None else [given[None].long().to(self.model.embedding.weight.device)]
        with replayed([self.model], spec, experts), recorded([self.model], spec, self.record_experts) as made:
            logits_WV = self._logits(batch)
        if self.record_experts:
            batch.chosen_NLK = torch.stack([made[place][0][0] for place in sorted(made)], 1).cpu()
        return logits_WV

    def _logits(self, batch: RaggedBatch) -> Tensor:
        device = self.model.embedding.weight.device
        self.cache.begin(batch, device)
        tokens_1N = torch.tensor([batch.tokens], device=device)
        positions_N = torch.tensor(batch.positions, device=device)
        x_1ND = self.model.embed(tokens_1N, positions_N, None)
        x_1ND = self.model.run_layers(x_1ND, positions_N, None)[:, batch.wanted]
        return self.model.logits(self.model.norm(x_1ND))[0]


class Replacements:
    """Attributes of modules that are replaced, and set back by `undo`."""

    def __init__(self) -> None:
        self._before: list[tuple[Any, str, Any]] = []

    def set(self, owner: Any, name: str, value: Any) -> None:
        """Set an attribute of an object."""
        self._before.append((owner, name, vars(owner).get(name, _ABSENT)))
        setattr(owner, name, value)

    def undo(self) -> None:
        """Give every attribute its value before `set`."""
        for owner, name, value in reversed(self._before):
            delattr(owner, name) if value is _ABSENT else setattr(owner, name, value)
        self._before.clear()


_ABSENT = object()


def check_sequence_len(spec: ModelSpec, n_positions: int) -> None:
    """Raise InputError if keys of two sets of frequencies would be mixed in a cache of sequences of up to `n_positions`
    tokens."""
    scaling = spec.rope_scaling
    if scaling is not None and scaling.kind == "longrope" and n_positions > scaling.original_max_seq_len:
        raise InputError(
            f"sequences of up to {n_positions} tokens: longrope has other frequencies beyond "
            f"rope_scaling.original_max_seq_len={scaling.original_max_seq_len}, and the keys in the cache would keep "
            f"the old ones; valid: prompt and new tokens of at most {scaling.original_max_seq_len} together"
        )


def _set_sequence_len(changes: Replacements, model: Transformer, n_positions: int) -> None:
    """Make the model rotate keys by one set of frequencies, by the longest sequence that fits in the cache: keys
    in the cache stay as they are when a sequence grows."""
    changes.set(model, "sequence_len", lambda n_tokens: n_positions)


class LayoutEngine:
    """Runs passes of a model on this rank of a layout; every rank of the world makes one and calls `run` as often, with
    as many passes."""

    def __init__(
        self,
        model: ParallelModel,
        device: torch.device,
        n_slots: int,
        n_positions: int,
        n_ahead: int = 0,
        replica: dist.ProcessGroup | None = None,
        record_experts: bool = False,
    ) -> None:
        """Sizes of the cache: see `cache.Cache`. `replica`: of an earlier engine of this model, so that no further
        process group is made. `record_experts`: batches receive the experts of their tokens. After an error the model
        is as before."""
        check_sequence_len(model.spec, n_positions)
        self.model, self.device, self.layout = model, device, model.layout
        self.record_experts = record_experts
        self.cache = Cache(n_slots, n_positions, n_ahead)
        if device.type == "cpu":
            configure_malloc()
        layout, rank = self.layout, dist.get_rank()
        self.n_batches, self.one_prompt, self.in_step = layout.pp, layout.cp > 1, layout.data_ranks > 1
        # Ranks of one replica run the same sequences; one rank with the head chooses their tokens.
        replicas = [list(ranks) for ranks in layout.groups("pp", "cp", "tp")]
        self.replica = dist.new_subgroups_by_enumeration(replicas)[0] if replica is None else replica
        data_axes = {axis: layout.coordinates(rank)[axis] for axis in ("dp_replicate", "dp_shard")}
        self._chooser = layout.rank_at(data_axes | {"pp": layout.pp - 1})
        self._upcoming: Iterator[RaggedBatch] = iter(())
        self._logits: list[Tensor] = []
        model.train(False)
        self._changes = Replacements()
        self._hooks: list[RemovableHandle] = []
        try:
            self._attach_to_parts(n_positions)
        except BaseException:
            self.close()
            raise

    def _attach_to_parts(self, n_positions: int) -> None:
        """Give every part of the model the cache, and hooks that start a pass and select the wanted tokens."""
        for part in self.model.parts:
            _attach(self._changes, part, self.cache, self._gather_shards, self._gather_context)
            _set_sequence_len(self._changes, part, n_positions)
            self._hooks.append(part.register_forward_pre_hook(self._begin))
            if part.norm is not None:
                self._hooks.append(part.norm.register_forward_pre_hook(self._select))
                if isinstance(part.head, VocabularyHead):  # it reads the wanted tokens, which are not sharded
                    self._changes.set(part.head, "axis", replace(part.head.axis, token_shards=False))

    def close(self) -> None:
        """Give the model its own attention again, without a cache."""
        for hook in self._hooks:
            hook.remove()
        self._changes.undo()
        self.model.runner.release()

    @torch.no_grad()
    def run(self, batches: Sequence[RaggedBatch]) -> list[Tensor]:
        sharded = self._is_sharded(batches)
        cuts = sequence_cuts(self.layout) if sharded else self.layout.tp if self.layout.token_shards else 1
        n_padded = max(1, *(-(-batch.n_tokens // cuts) for batch in batches)) * cuts
        for batch in batches:
            batch.spans = self._rank_spans(n_padded) if sharded else None
        self._upcoming, self._logits = iter(batches), []
        replays = any(batch.replayed_NLK is not None for batch in batches)
        experts = [self._own_choices(batch, n_padded) for batch in batches] if replays else None
        parts, spec = self.model.parts, self.model.spec
        with replayed(parts, spec, experts), recorded(parts, spec, self.record_experts) as made:
            self.model.runner.evaluate([self._microbatch(batch, n_padded) for batch in batches], self._collect)
        for number, batch in enumerate(batches) if self.record_experts else ():
            self._keep_choices(batch, {place: choices[number] for place, choices in made.items()})
        size, tp = self.model.spec.vocab_size, self.model.groups.tp
        return [gather_vocabulary(logits_Wv, size, tp) for logits_Wv in self._logits]

    def agree(self, choose: Callable[[], Tensor], shape: tuple[int, ...]) -> Tensor:
        if self.replica.size() == 1:
            return choose().cpu()
        chosen = torch.empty(shape, dtype=torch.int64, device=self.device)
        if dist.get_rank() == self._chooser:
            chosen.copy_(choose())
        dist.broadcast(chosen, self._chooser, group=self.replica)
        return chosen.cpu()

    def anywhere(self, left: bool) -> bool:
        if not self.in_step:
            return left
        any_left = torch.tensor(int(left), device=self.device)
        dist.all_reduce(any_left, dist.ReduceOp.MAX)
        return bool(any_left)

    def _microbatch(self, batch: RaggedBatch, n_padded: int) -> Microbatch:
        tokens_N = torch.zeros(n_padded, dtype=torch.int64)
        tokens_N[: batch.n_tokens] = torch.tensor(batch.tokens, dtype=torch.int64)
        positions_N = torch.zeros(n_padded, dtype=torch.int64)
        positions_N[: batch.n_tokens] = torch.tensor(batch.positions, dtype=torch.int64)
        if batch.spans is not None:
            local = torch.cat([torch.arange(span.start, span.stop) for span in batch.spans])
            tokens_N, positions_N = tokens_N[local], positions_N[local]
        tokens_1N = tokens_N[None].to(self.device)
        return Microbatch(tokens_1N, tokens_1N, positions_N.to(self.device), None)

    def _own_choices(self, batch: RaggedBatch, n_padded: int) -> Tensor:
        """Return the choices of experts to replay of this rank's tokens of a pass, (1, t, L, K)."""
        experts_NLK = batch.replayed_NLK
        if experts_NLK is None:  # a pass without tokens
            experts_NLK = torch.zeros(0, *choice_shape(self.model.spec), dtype=torch.int64)
        experts_NLK = padded_choices(experts_NLK, n_padded)
        if batch.spans is not None:
            experts_NLK = torch.cat([experts_NLK[span.start : span.stop] for span in batch.spans])
        if self.layout.token_shards:
            experts_NLK = experts_NLK.chunk(self.layout.tp)[self.layout.coordinates(dist.get_rank())["tp"]]
        return experts_NLK[None].to(self.device)

    def _keep_choices(self, batch: RaggedBatch, made: Mapping[int, Tensor]) -> None:
        """Give a batch the choices of experts of its tokens in all layers, on every rank of the replica."""
        shape = batch.n_tokens, *choice_shape(self.model.spec)
        chosen_NLK = torch.zeros(shape, dtype=torch.int64, device=self.device)
        for place in sorted(made):
            experts_1tK = self._gather_shards(made[place])
            if batch.spans is not None:
                experts_1tK = self._gather_context(experts_1tK)
            chosen_NLK[:, place] = experts_1tK[0, : batch.n_tokens]
        if self.model.groups.pp is not None:
            dist.all_reduce(chosen_NLK, group=self.model.groups.pp)
        batch.chosen_NLK = chosen_NLK.cpu()

    def _begin(self, module: nn.Module, inputs: Any) -> None:
        """Start the next pass: a runner takes the micro-batches of a pass in their order."""
        self.cache.begin(next(self._upcoming), self.device)

    def _select(self, module: nn.Module, inputs: tuple[Tensor]) -> tuple[Tensor]:
        """Return the wanted tokens alone, for the last norm and the head."""
        x_1ND = self._gather_shards(inputs[0])
        batch = self.cache.batch
        if batch.spans is not None:
            x_1ND = self._gather_context(x_1ND)
        return (x_1ND[:, batch.wanted],)

    def _collect(self, logits_1Wv: Tensor, _: Tensor) -> Tensor:
        self._logits.append(logits_1Wv[0])
        return logits_1Wv.new_zeros(())

    def _gather_shards(self, x_1tD: Tensor) -> Tensor:
        """Return the tokens of all ranks of tp, with sequence parallelism."""
        if not self.layout.token_shards:
            return x_1tD
        assert self.model.groups.tp is not None
        return start_gather_tokens(x_1tD, self.model.groups.tp).wait()

    def _gather_context(self, x_1tD: Tensor) -> Tensor:
        """Return the tokens of all ranks of cp, in the order of the sequence; (1, t, ...) -> (1, N, ...)."""
        whole = x_1tD
        for group in (self.model.groups.cp_ulysses, self.model.groups.cp_ring):
            if group is not None:
                whole = start_gather_tokens(whole.flatten(2), group).wait().unflatten(2, x_1tD.shape[2:])
        layout = self.layout
        ring = layout.cp_ring
        of_ranks = [spans(layout.cp_method, whole.shape[1], ring, 1, rank, 0) for rank in range(ring)]
        positions_N = torch.cat([torch.arange(s.start, s.stop) for of_rank in of_ranks for s in of_rank])
        ordered = torch.empty_like(whole)
        ordered[:, positions_N.to(whole.device)] = whole
        return ordered

    def _is_sharded(self, batches: Sequence[RaggedBatch]) -> bool:
        """Return whether the tokens of these passes are sharded over cp: each starts one sequence."""
        begins = all(batch.is_prefill and len(batch.segments) <= 1 for batch in batches)
        return self.layout.cp > 1 and begins and any(batch.n_tokens for batch in batches)

    def _rank_spans(self, n_padded: int) -> list[range]:
        """Return this rank's tokens of a row that is sharded over cp."""
        layout, at = self.layout, self.layout.coordinates(dist.get_rank())
        return spans(layout.cp_method, n_padded, layout.cp_ring, layout.cp_ulysses, at["cp_ring"], at["cp_ulysses"])


def _attach(
    changes: Replacements,
    model: nn.Module,
    cache: Cache,
    gather_shards: Callable[[Tensor], Tensor],
    gather_context: Callable[[Tensor], Tensor],
) -> None:
    """Give every attention of a model, or of a pipeline stage, a layer of the cache."""
    for module in model.modules():
        if isinstance(module, GatedDeltaNet):
            net: Any = module
            changes.set(net, "mix", CachedDeltaNet(module, cache, gather_context))
    for module in attend_modules(model):
        prefill = PrefillAttention(cache, module.attend)
        if isinstance(module, LatentAttention):
            whole: Any = module
            latents = CachedLatentAttention(module, cache.layer(), gather_shards, gather_context)
            changes.set(whole, "over_latents", latents)
            changes.set(module, "attend", prefill)
        else:
            layer = cache.layer(getattr(module, "rule", None))
            changes.set(module, "attend", CachedAttention(layer, prefill, gather_context))
