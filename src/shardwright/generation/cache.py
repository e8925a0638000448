"""The cache of keys and values: attention of new tokens to all tokens of their sequences.

The modules of a model are not changed. Their attribute `attend`, which context parallelism replaces too, becomes an
attention that writes the keys and values of the new tokens into the cache and reads all earlier ones. A module with
`attend` in a user's own family is served in the same way.

A rank of tp has the keys and values of its own heads alone. A layer with a window has only the keys of the window.
`serving.work` has the bytes as a formula.

The cache of multi-head latent attention has one latent vector and one rotated key a token, for all heads. The query of
a head is multiplied by that head's matrix of keys, and the output by its matrix of values, instead of every cached
latent vector (DeepSeek-V2, arXiv 2405.04434, section 2.1.2: the matrices are absorbed):

    q_N . (W_k latent) = (q_N W_k) . latent        sum_s p_s (W_v latent_s) = W_v (sum_s p_s latent_s)

So the scores of all heads read one cached row of L + P elements, whose first L elements are the values too. The pass in
which a sequence starts computes keys and values of every head, as training does, which is less work for many queries.

Linear attention keeps no keys: a sequence has a matrix for each value head and the last inputs of the convolution,
whatever its length. They are zero when a sequence starts.

Shapes: N tokens of a pass, B sequences, S positions of the cache, H heads, K kv heads, C width of one head. In latent
attention L latent, N unrotated part of a head, P rotated part, V value, X = N + V.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shardwright.generation.batch import RaggedBatch, SequenceSegment
from shardwright.model.attention import Attend, attend
from shardwright.model.batch_invariant import is_batch_invariant
from shardwright.model.documents import Documents
from shardwright.model.latent_attention import LatentAttention
from shardwright.model.linear_attention import GatedDeltaNet, LinearState
from shardwright.model.piece_attention import AttentionRule, OwnKeys, PieceAttention
from shardwright.model.pieces import ROWS_TOGETHER, AttentionPiece
from shardwright.parallel.norm import local_part


class Cache:
    """The keys and values of all layers of a model, or of a pipeline stage, for `n_slots` sequences of at most
    `n_positions` tokens. `n_ahead`: the most tokens of a sequence that may be written and then replaced by others."""

    def __init__(self, n_slots: int, n_positions: int, n_ahead: int = 0) -> None:
        self.n_slots, self.n_positions, self.n_ahead = n_slots, n_positions, n_ahead
        self.layers: list[LayerCache | CachedDeltaNet] = []
        self.batch = RaggedBatch((), ())
        """The current pass."""
        self.mask: Tensor | None = None
        """The `decode_mask` of the current pass, made once for all layers."""

    def begin(self, batch: RaggedBatch, device: torch.device) -> None:
        """Set the pass of the next forward pass."""
        self.batch = batch
        self.mask = batch.decode_mask(device) if batch.segments and batch.is_decode else None

    def layer(self, rule: AttentionRule | None = None) -> "LayerCache":
        """Return the cache of one more layer; `rule`: of the layer's attention, if it has one."""
        layer = LayerCache(self) if rule is None else RuledLayerCache(self, rule)
        self.layers.append(layer)
        return layer

    @property
    def n_bytes(self) -> int:
        return sum(tensor.numel() * tensor.element_size() for layer in self.layers for tensor in layer.tensors)


class LayerCache:
    """The keys and values of one layer, (slots, K, places, C), a place for each position; allocated by the first write,
    whose tensors give K and C."""

    def __init__(self, cache: Cache) -> None:
        self.cache, self.n_places = cache, cache.n_positions
        self.tensors: list[Tensor] = []

    def allocate(self, *new_NKC: Tensor) -> None:
        """Make the tensors of the layer, unless they exist."""
        if not self.tensors:
            shapes = [(self.cache.n_slots, x.shape[1], self.n_places, x.shape[2]) for x in new_NKC]
            # Zeros: masked values are multiplied by 0, and a stray nan times 0 is nan.
            self.tensors = [x.new_zeros(shape) for x, shape in zip(new_NKC, shapes, strict=True)]

    def write(self, *new_NKC: Tensor) -> None:
        """Store the keys, and the values if they differ, of the tokens of the current pass."""
        cache = self.cache
        self.allocate(*new_NKC)
        for kept, x_NKC in zip(self.tensors, new_NKC, strict=True):
            if cache.batch.is_decode and len(cache.batch.segments) > 1:
                kept[cache.batch.slots, :, cache.batch.starts] = x_NKC
                continue
            for segment, x_TKC in zip(cache.batch.segments, x_NKC.split(_lengths(cache.batch)), strict=True):
                kept[segment.slot, :, segment.start : segment.stop] = x_TKC.transpose(0, 1)

    def attend(self, q_NHC: Tensor, scale: float | None = None) -> Tensor:
        """Return attention of the new tokens to all tokens of their own sequences, which are written; (N, H, C).
        `scale` replaces 1 / sqrt(C)."""
        batch, (keys, values) = self.cache.batch, (self.tensors[0], self.tensors[-1])
        if is_batch_invariant():
            assert scale is None
            return self._attend_in_blocks(q_NHC)
        if batch.is_decode:
            k_BKSC, v_BKSC = (x[batch.rows, :, : batch.longest] for x in (keys, values))
            return _attention(q_NHC.unsqueeze(2), k_BKSC, v_BKSC, self.cache.mask, scale).squeeze(2)
        parts = []
        for segment, q_THC in zip(batch.segments, q_NHC.split(_lengths(batch)), strict=True):
            k_1KSC, v_1KSC = (x[segment.slot, :, : segment.stop].unsqueeze(0) for x in (keys, values))
            q_1HTC = q_THC.transpose(0, 1).unsqueeze(0)
            for piece in _whole_piece(segment).cut(ROWS_TOGETHER):  # so that masks are linear in the sequence
                q, k, v = q_1HTC[:, :, piece.rows], k_1KSC[:, :, piece.columns], v_1KSC[:, :, piece.columns]
                o_1HTC = _attention(q, k, v, _causal_mask(piece, q_THC.device), scale)
                parts.append(o_1HTC[0].transpose(0, 1))
        return torch.cat(parts)

    def _attend_in_blocks(self, q_NHC: Tensor) -> Tensor:
        parts = []
        for segment, q_THC in zip(self.cache.batch.segments, q_NHC.split(_lengths(self.cache.batch)), strict=True):
            k_1SKC, v_1SKC = (x[segment.slot, :, : segment.stop].transpose(0, 1).unsqueeze(0) for x in self.tensors)
            parts.append(_attend_pieces(q_THC, k_1SKC, v_1SKC, AttentionRule(), (_whole_piece(segment),)))
        return torch.cat(parts)


def _attend_pieces(
    q_THC: Tensor, k_1SKC: Tensor, v_1SKC: Tensor, rule: AttentionRule, pieces: tuple[AttentionPiece, ...]
) -> Tensor:
    """Return attention (T, H, C) of the new tokens of one sequence."""
    tensors = q_THC.unsqueeze(0), k_1SKC, v_1SKC, rule.sinks_H
    o_1THC: Tensor = PieceAttention.apply(*tensors, (pieces,), rule.softcap, OwnKeys())
    return o_1THC[0]


class RuledLayerCache(LayerCache):
    """The keys and values of a layer whose attention has a rule. With a window, or chunks as long, position p is in
    place p mod R of R = window + `n_ahead` places, so a token that is replaced never overwrites one that is still
    read."""

    def __init__(self, cache: Cache, rule: AttentionRule) -> None:
        super().__init__(cache)
        self.window, self.chunked = rule.window, rule.chunked
        if self.window:
            self.n_places = min(cache.n_positions, self.window + cache.n_ahead)

    def attend_and_write(self, q_NHC: Tensor, k_NKC: Tensor, v_NKC: Tensor, rule: AttentionRule) -> Tensor:
        """Return attention of the new tokens to all tokens of their sequences by `rule`, (N, H, C), and store the new
        keys and values. Earlier keys are read first, because new ones may take their places."""
        lengths, outputs = _lengths(self.cache.batch), []
        parts = zip(*(x.split(lengths) for x in (q_NHC, k_NKC, v_NKC)), strict=True)
        for segment, (q_THC, *new) in zip(self.cache.batch.segments, parts, strict=True):
            n_old = self._n_read(segment.start)
            first = segment.start - n_old
            if n_old:
                old = [x[segment.slot, :, self._places(first, segment.start, x)].transpose(0, 1) for x in self.tensors]
                k_1MKC, v_1MKC = (torch.cat(pair).unsqueeze(0) for pair in zip(old, new, strict=True))
            else:
                k_1MKC, v_1MKC = (x.unsqueeze(0) for x in new)
            outputs.append(_attend_pieces(q_THC, k_1MKC, v_1MKC, rule, self._pieces(segment.length, n_old, first)))
        self.write(k_NKC, v_NKC)
        return torch.cat(outputs)

    def _n_read(self, start: int) -> int:
        """Return the number of earlier tokens that the token at position `start` attends to."""
        if self.chunked:
            return start % self.window
        return min(start, self.window - 1) if self.window else start

    def _pieces(self, n_new: int, n_old: int, first: int) -> tuple[AttentionPiece, ...]:
        """Return the attention of new tokens to `n_old` earlier ones, from position `first`, and to themselves; columns
        are both in order."""
        if not self.chunked:
            rows, columns = slice(0, n_new), slice(0, n_old + n_new)
            return (AttentionPiece(rows, columns, causal=True, shift=n_old, window=self.window, first=first),)
        pieces = []
        for start in range(0, n_old + n_new, self.window):  # the first column of each chunk
            stop, shift = min(start + self.window, n_old + n_new), max(n_old - start, 0)
            rows = slice(start + shift - n_old, stop - n_old)
            pieces.append(AttentionPiece(rows, slice(start, stop), causal=True, shift=shift))
        return tuple(pieces)

    def write(self, *new_NKC: Tensor) -> None:
        """Store the keys and values of the tokens of the current pass; of more than R tokens the last R."""
        cache = self.cache
        self.allocate(*new_NKC)
        for kept, x_NKC in zip(self.tensors, new_NKC, strict=True):
            for segment, x_TKC in zip(cache.batch.segments, x_NKC.split(_lengths(cache.batch)), strict=True):
                first = max(segment.start, segment.stop - self.n_places)
                last_TKC = x_TKC[first - segment.start :]
                kept[segment.slot, :, self._places(first, segment.stop, kept)] = last_TKC.transpose(0, 1)

    def _places(self, start: int, stop: int, like: Tensor) -> Tensor:
        """Return the places of positions `start` to `stop` - 1."""
        return torch.arange(start, stop, device=like.device) % self.n_places


class PrefillAttention:
    """A replacement for `causal_attention` in a pass in which every sequence starts, so nothing is read from the cache;
    (1, N, H, C) each. `sharded`: context-parallel attention, for a sequence whose tokens are sharded over cp."""

    def __init__(self, cache: Cache, sharded: Attend) -> None:
        self.cache, self.sharded = cache, sharded

    def __call__(
        self,
        q_1NHC: Tensor,
        k_1NKC: Tensor,
        v_1NKC: Tensor,
        documents: Documents | None = None,
        rule: AttentionRule | None = None,
    ) -> Tensor:
        batch = self.cache.batch
        if batch.spans is not None:
            return self.sharded(q_1NHC, k_1NKC, v_1NKC, documents, rule)
        parts = [x[:, : batch.n_tokens].split(_lengths(batch), 1) for x in (q_1NHC, k_1NKC, v_1NKC)]
        o_1NHC = torch.cat([attend(q, k, v, None, rule) for q, k, v in zip(*parts, strict=True)], 1)
        return padded(o_1NHC[0], q_1NHC)


class CachedAttention:
    """A replacement for `causal_attention` over the tokens of any pass, with the cache of one layer.

    `gather` returns the keys or values of all tokens of a sequence that is sharded over cp, in their order."""

    def __init__(self, layer: LayerCache, prefill: PrefillAttention, gather: Callable[[Tensor], Tensor]) -> None:
        self.layer, self.prefill, self.gather = layer, prefill, gather

    def __call__(
        self,
        q_1NHC: Tensor,
        k_1NKC: Tensor,
        v_1NKC: Tensor,
        documents: Documents | None = None,
        rule: AttentionRule | None = None,
    ) -> Tensor:
        batch = self.layer.cache.batch
        n = batch.n_tokens
        if n == 0:  # padding alone: other ranks have tokens
            return torch.zeros_like(q_1NHC)
        whole = [self.gather(x) for x in (k_1NKC, v_1NKC)] if batch.spans is not None else [k_1NKC, v_1NKC]
        new_NKC = [x[0, :n] for x in whole]
        if rule is not None and not batch.is_prefill:
            assert isinstance(self.layer, RuledLayerCache)
            k_NKC, v_NKC = new_NKC
            return padded(self.layer.attend_and_write(q_1NHC[0, :n], k_NKC, v_NKC, rule), q_1NHC)
        self.layer.write(*new_NKC)
        if batch.is_prefill:
            return self.prefill(q_1NHC, k_1NKC, v_1NKC, documents, rule)
        return padded(self.layer.attend(q_1NHC[0, :n]), q_1NHC)


def padded(o_N: Tensor, like_1N: Tensor) -> Tensor:
    """Return the output of the tokens of a pass (N, ...) with zeros for the padding of the input (1, N, ...)."""
    missing = like_1N.shape[1] - o_N.shape[0]
    return (F.pad(o_N, (0, 0) * (o_N.dim() - 1) + (0, missing)) if missing else o_N).unsqueeze(0)


def attend_modules(model: nn.Module) -> list[Any]:
    """Return the modules of a model whose attention can be replaced, in the order of its layers."""
    return [module for module in model.modules() if hasattr(module, "attend")]


def _lengths(batch: RaggedBatch) -> list[int]:
    return [segment.length for segment in batch.segments]


def _whole_piece(segment: SequenceSegment) -> AttentionPiece:
    """Return the attention of the new tokens of a sequence to all its tokens."""
    return AttentionPiece(slice(0, segment.length), slice(0, segment.stop), causal=True, shift=segment.start)


def _causal_mask(piece: AttentionPiece, device: torch.device) -> Tensor | None:
    """Return the tokens that each token of a piece attends to, (T, S); None for all."""
    if not piece.hides_late:
        return None
    return torch.ones(piece.n_rows, piece.n_columns, dtype=torch.bool, device=device).tril(piece.shift)


def _attention(q_BHTC: Tensor, k_BKSC: Tensor, v_BKSC: Tensor, mask: Tensor | None, scale: float | None) -> Tensor:
    grouped = q_BHTC.shape[1] != k_BKSC.shape[1]
    return F.scaled_dot_product_attention(q_BHTC, k_BKSC, v_BKSC, attn_mask=mask, scale=scale, enable_gqa=grouped)


class CachedLatentAttention:
    """A replacement for `LatentAttention.over_latents` of `module`, with the cache of one layer.

    `gather_shards`: this rank's token shard of latent vectors -> the latent vectors of all tokens (sequence
    parallelism); `gather_context`: the same over cp, in the pass that starts a sequence.
    """

    def __init__(
        self,
        module: Any,
        layer: LayerCache,
        gather_shards: Callable[[Tensor], Tensor],
        gather_context: Callable[[Tensor], Tensor],
    ) -> None:
        self.module, self.layer = module, layer
        self.gather_shards, self.gather_context = gather_shards, gather_context

    def __call__(self, q_1NHC: Tensor, latent_1NL: Tensor, k_1N1P: Tensor, documents: Documents | None) -> Tensor:
        batch = self.layer.cache.batch
        n = batch.n_tokens
        kept_1NX = torch.cat((self.gather_shards(latent_1NL), k_1N1P.squeeze(2)), -1)
        if batch.spans is not None:
            kept_1NX = self.gather_context(kept_1NX)
        if n:
            self.layer.write(kept_1NX[0, :n].unsqueeze(1))
        if batch.is_prefill and n:
            return LatentAttention.over_latents(self.module, q_1NHC, latent_1NL, k_1N1P, documents)
        return self._absorbed(q_1NHC)

    def _absorbed(self, q_1NHC: Tensor) -> Tensor:
        nope, v_dim = self.module.kv_widths
        weight_HXL = local_part(self.module.kv_up.weight).unflatten(0, (-1, nope + v_dim))
        w_k_HNL, w_v_HVL = weight_HXL.split((nope, v_dim), 1)
        n = self.layer.cache.batch.n_tokens
        if n == 0:
            return q_1NHC.new_zeros(*q_1NHC.shape[:3], v_dim)
        q_NHC = q_1NHC[0, :n]
        q_NHN, q_NHP = q_NHC.split(self.module.widths, -1)
        q_NHL = torch.einsum("nhc,hcl->nhl", q_NHN, w_k_HNL)
        o_NHL = self.layer.attend(torch.cat((q_NHL, q_NHP), -1), scale=q_NHC.shape[-1] ** -0.5)[..., : w_k_HNL.shape[2]]
        return padded(torch.einsum("nhl,hvl->nhv", o_NHL, w_v_HVL), q_1NHC)


class CachedDeltaNet:
    """A replacement for `GatedDeltaNet.mix` of `module`, with the states of the sequences of one layer: the inputs of
    the convolution (slots, W, F), and the matrices of heads (slots, H, K, V).

    A state cannot go back to an earlier token. So if tokens may be replaced (`Cache.n_ahead`), the state of a sequence
    is the state before its last tokens, and the projections of these are kept, (slots, n_ahead, F). A pass first runs
    the kept tokens that were not replaced, then its new tokens.
    """

    def __init__(self, module: GatedDeltaNet, cache: Cache, gather_context: Callable[[Tensor], Tensor]) -> None:
        self.module, self.cache, self.gather_context = module, cache, gather_context
        self.states: list[Tensor] = []
        self.projections: list[Tensor] = []
        self._in_state: dict[int, int] = {}
        """Slot -> the number of its tokens that are in the state, if tokens may be replaced."""
        cache.layers.append(self)

    @property
    def tensors(self) -> list[Tensor]:
        """The tensors that the cache keeps."""
        return self.states + self.projections

    def __call__(self, qkvz_1NF: Tensor, ba_1NF: Tensor, weights: list[Tensor], documents: Documents | None) -> Tensor:
        batch, n = self.cache.batch, self.cache.batch.n_tokens
        if n == 0:  # padding alone: other ranks have tokens
            widths = self.module.widths
            return qkvz_1NF.new_zeros(*qkvz_1NF.shape[:2], qkvz_1NF.shape[2] // sum(widths) * widths[-1])
        for tensor in self.states:
            tensor[[segment.slot for segment in batch.segments if segment.start == 0]] = 0
        whole = [x if batch.spans is None else self.gather_context(x) for x in (qkvz_1NF, ba_1NF)]
        projections = [x[:, :n] for x in whole]
        if batch.is_decode and not self.cache.n_ahead:
            o_NF = self._advance(batch.rows, [x.transpose(0, 1) for x in projections], weights)[:, 0]
        else:
            parts = zip(*(x.split(_lengths(batch), 1) for x in projections), strict=True)
            run = self._run_again if self.cache.n_ahead else self._run
            o_NF = torch.cat(
                [run(*segment_and_parts, weights)[0] for segment_and_parts in zip(batch.segments, parts, strict=True)]
            )
        o_1NF = padded(o_NF, whole[0])
        return o_1NF if batch.spans is None else torch.cat([o_1NF[:, at.start : at.stop] for at in batch.spans], 1)

    def _run(self, segment: SequenceSegment, projections: Sequence[Tensor], weights: list[Tensor]) -> Tensor:
        return self._advance(slice(segment.slot, segment.slot + 1), projections, weights)

    def _run_again(self, segment: SequenceSegment, projections: Sequence[Tensor], weights: list[Tensor]) -> Tensor:
        """Return the outputs of the new tokens of a sequence, (1, T, F), after its tokens that are not in the state."""
        row, n_ahead = slice(segment.slot, segment.slot + 1), self.cache.n_ahead
        in_state = self._in_state.get(segment.slot, 0) if segment.start else 0
        n_again = segment.start - in_state
        assert 0 <= n_again <= n_ahead, f"{n_again} tokens are not in the state, which is {n_ahead} behind"
        if not self.projections:
            self.projections = [x.new_zeros(self.cache.n_slots, n_ahead, x.shape[2]) for x in projections]
        kept = (x[row, :n_again] for x in self.projections)
        tokens = [torch.cat(pair, 1) for pair in zip(kept, projections, strict=True)]
        n_final = max(0, segment.stop - n_ahead - in_state)  # no later pass replaces these
        final, others = ([x[:, at] for x in tokens] for at in (slice(n_final), slice(n_final, None)))
        outputs = [self._advance(row, final, weights)] if n_final else []
        outputs.append(self.module.mix_from(self._before(row), None, *others, *weights)[0])
        for x, kept_x in zip(others, self.projections, strict=True):
            kept_x[row, : x.shape[1]] = x
        self._in_state[segment.slot] = in_state + n_final
        return torch.cat(outputs, 1)[:, n_again:]

    def _before(self, rows: slice | Tensor) -> LinearState | None:
        return LinearState(*(tensor[rows] for tensor in self.states)) if self.states else None

    def _advance(self, rows: slice | Tensor, projections: Sequence[Tensor], weights: list[Tensor]) -> Tensor:
        """Return the outputs of the next tokens of the sequences in some rows, (B, T, F), and store the new states."""
        o_BTF, after = self.module.mix_from(self._before(rows), None, *projections, *weights)
        if not self.states:
            self.states = [x.new_zeros(self.cache.n_slots, *x.shape[1:]) for x in after]
        for tensor, x in zip(self.states, after, strict=True):
            tensor[rows] = x
        return o_BTF
