"""Linear attention: a gated delta net with a short causal convolution (Yang et al., arXiv 2412.06464).

Each value head has a state S, a matrix that maps keys to values. A token decays it, and moves the value at its key
towards its own value:

    S_t = a_t S_t-1 + k_t (b_t (v_t - (a_t S_t-1)^T k_t))^T        o_t = S_t^T q_t / sqrt(K)

with a_t = exp(-exp(a_log) softplus(x W_a + dt_bias)) and b_t = sigmoid(x W_b), one each a head. Queries, keys and
values are silu(convolution) of the projections over the last few tokens; queries and keys have unit length. The output
of a head is RMSNorm(o_t) * silu(z_t), with z another projection. At the first token of a document the state is zero,
and the convolution reads no earlier tokens.

Training uses the chunked form of section 3.3: within a chunk of C tokens the updates are the solution of a triangular
system, and the state passes from chunk to chunk. Memory grows with T C instead of T K V. All products are in 32 bits or
wider. Only the projections are saved for the backward pass, which computes the scan again, as fused attention does.

Shapes: B batch, T tokens, D model, G query and key heads, H value heads, K and V widths of their heads, W tokens of the
convolution, N chunks, C tokens of a chunk, F features.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from shardwright.model.device_type import to_device
from shardwright.model.documents import Documents
from shardwright.model.linear_sizes import CHUNK
from shardwright.model.matmul import Linear
from shardwright.model.norm import RMSNorm
from shardwright.model.recompute import part
from shardwright.model.spec import ModelSpec

_UNIT_EPS = 1e-6
"""Added to the squared length of queries and keys, as in the code of Qwen3-Next."""


class LinearState(NamedTuple):
    """The state of sequences after their last token: the last inputs of the convolution and the matrices of heads."""

    inputs_BWF: Tensor
    state_BHKV: Tensor


class GatedDeltaNet(nn.Module):
    """A layer's linear attention. The number of heads follows from the output of the projections, so the module also
    works with a shard of the heads."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        linear = spec.linear_attention
        assert linear is not None
        keys, values, heads = linear.n_k_heads * linear.k_dim, linear.n_v_heads * linear.v_dim, linear.n_v_heads
        group = heads // linear.n_k_heads
        self.k_dim, self.v_dim = linear.k_dim, linear.v_dim
        self.widths = (linear.k_dim, linear.k_dim, group * linear.v_dim, group * linear.v_dim)
        self.qkvz = Linear(spec.d_model, 2 * (keys + values), bias=False)
        self.ba = Linear(spec.d_model, 2 * heads, bias=False)
        self.q_conv = Filter(keys, linear.conv_width)
        self.k_conv = Filter(keys, linear.conv_width)
        self.v_conv = Filter(values, linear.conv_width)
        self.a_log = nn.Parameter(torch.empty(heads))
        self.dt_bias = nn.Parameter(torch.empty(heads))
        self.norm = RMSNorm(linear.v_dim, eps=spec.norm_eps)
        self.out = Linear(values, spec.d_model, bias=False)

    def forward(self, x_BTD: Tensor, rotary: Tensor | None = None, documents: Documents | None = None) -> Tensor:
        """(B, T, D) -> (B, T, D); arguments as in `Attention.forward`. Nothing is rotated."""
        weights = self.local_weights()

        def mixed(qkvz_BTF: Tensor, ba_BTF: Tensor) -> Tensor:
            return self.mix(qkvz_BTF, ba_BTF, weights, documents)

        return self.out(part("attention", mixed, self.qkvz(x_BTD), self.ba(x_BTD), weights=weights, compiles=False))

    def local_weights(self) -> list[Tensor]:
        """Return this rank's part of the weights that `mix` reads."""
        weights = [conv.weight for conv in (self.q_conv, self.k_conv, self.v_conv)]
        weights += [self.a_log, self.dt_bias, self.norm.weight]
        return [weight.to_local() if isinstance(weight, DTensor) else weight for weight in weights]

    @torch.compiler.disable
    def mix(self, qkvz_BTF: Tensor, ba_BTF: Tensor, weights: list[Tensor], documents: Documents | None) -> Tensor:
        """Return the gated outputs of all heads from the projections; (B, T, H V). Context parallelism replaces this
        method, to pass states from rank to rank, and generation, to keep the states of sequences."""
        document_BU = None
        if documents is not None:
            numbers_BT = to_device(document_numbers(documents), qkvz_BTF.device)
            document_BU = F.pad(numbers_BT, (self.n_before, 0), value=-1)

        def compute(*tensors: Tensor) -> Tensor:
            return self.mix_from(None, document_BU, *tensors)[0]

        output_BTF: Tensor = _ComputedAgain.apply(compute, qkvz_BTF, ba_BTF, *weights)
        return output_BTF

    def mix_from(
        self, before: LinearState | None, document_BU: Tensor | None, qkvz_BTF: Tensor, ba_BTF: Tensor, *weights: Tensor
    ) -> tuple[Tensor, LinearState]:
        """Return the gated outputs of all heads (B, T, H V), and the state after the last token. `before`: the state
        before the first token, zeros if None. `document_BU`: as in `chunks`."""
        inputs_BWF = None if before is None else before.inputs_BWF
        chunks, z_BTF, last_BWF = self.chunks(inputs_BWF, document_BU, qkvz_BTF, ba_BTF, *weights)
        o_BHTV, state_BHKV = scan(chunks, None if before is None else before.state_BHKV)
        return self.gated(o_BHTV, z_BTF, weights[-1]).to(qkvz_BTF.dtype), LinearState(last_BWF, state_BHKV)

    @property
    def n_before(self) -> int:
        """Tokens before the first one whose document numbers the convolution and the state need."""
        return max(1, self.q_conv.weight.shape[-1] - 1)

    def conv_inputs(self, qkvz_BTF: Tensor) -> Tensor:
        """Return the projections that the convolution reads: queries, keys and values of all heads, (B, T, F)."""
        return torch.cat([x.flatten(-2) for x in self._parts(qkvz_BTF)[:3]], -1)

    def chunks(
        self,
        before_BWF: Tensor | None,
        document_BU: Tensor | None,
        qkvz_BTF: Tensor,
        ba_BTF: Tensor,
        *weights: Tensor,
    ) -> tuple["DeltaChunks", Tensor, Tensor]:
        """Return the chunks of the scan, the gates z (B, T, H V), and the last W - 1 inputs of the convolution.

        `before_BWF`: the W - 1 inputs before the first token, zeros if None. `document_BU`: the numbers of the
        documents of `n_before` tokens before the first one, -1 before the sequence, and of all T; None for one
        document.
        """
        wide = torch.promote_types(qkvz_BTF.dtype, torch.float32)
        *convs, a_log_H, dt_bias_H, _ = (weight.to(wide) for weight in weights)
        parts = self._parts(qkvz_BTF.to(wide))
        *qkv, z_BTF = (x.flatten(-2) for x in parts)
        ba_BTGF = ba_BTF.to(wide).unflatten(-1, (parts[0].shape[2], -1))
        b_BTH, a_BTH = (x.flatten(-2) for x in ba_BTGF.chunk(2, -1))
        earlier = [None] * 3 if before_BWF is None else before_BWF.split([x.shape[-1] for x in qkv], -1)
        convolved = [convolve(x, w, first, document_BU) for x, w, first in zip(qkv, convs, earlier, strict=True)]
        q_BTGK, k_BTGK = (_unit(F.silu(y).unflatten(-1, (-1, self.k_dim))) for y, _ in convolved[:2])
        v_BTHV = F.silu(convolved[2][0]).unflatten(-1, (-1, self.v_dim))
        group = v_BTHV.shape[2] // k_BTGK.shape[2]
        q_BHTK, k_BHTK = (x.repeat_interleave(group, 2).transpose(1, 2) for x in (q_BTGK, k_BTGK))
        log_decay_BHT = (-a_log_H.exp() * F.softplus(a_BTH + dt_bias_H)).transpose(1, 2)
        chunks = delta_chunks(
            q_BHTK * self.k_dim**-0.5, k_BHTK, v_BTHV.transpose(1, 2), log_decay_BHT, b_BTH.sigmoid().transpose(1, 2),
            document_BU,
        )  # fmt: skip
        return chunks, z_BTF, torch.cat([last for _, last in convolved], -1)

    def gated(self, o_BHTV: Tensor, z_BTF: Tensor, norm_V: Tensor) -> Tensor:
        """Return RMSNorm(o) silu(z) of all heads, (B, T, H V)."""
        normed_BTHV = F.rms_norm(o_BHTV.transpose(1, 2), (self.v_dim,), norm_V.to(o_BHTV.dtype), self.norm.eps)
        return normed_BTHV.flatten(-2) * F.silu(z_BTF)

    def _parts(self, qkvz_BTF: Tensor) -> tuple[Tensor, ...]:
        """Return q, k, v and z by group of heads, (B, T, G, F) each."""
        return qkvz_BTF.unflatten(-1, (-1, sum(self.widths))).split(self.widths, -1)


class Filter(nn.Module):
    """The weights of a convolution over the last `width` tokens, one filter a feature, (F, 1, W)."""

    def __init__(self, n_features: int, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(n_features, 1, width))


def _unit(x_BTGK: Tensor) -> Tensor:
    return x_BTGK * (x_BTGK.square().sum(-1, keepdim=True) + _UNIT_EPS).rsqrt()


def document_numbers(documents: Documents) -> Tensor:
    """Return for each token of whole sequences the number of its document in its sequence, (B, S), on the host."""
    return torch.stack([torch.arange(len(row)).repeat_interleave(torch.tensor(row)) for row in documents.lengths])


def convolve(
    x_BTF: Tensor, filter_F1W: Tensor, before_BWF: Tensor | None, document_BU: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Return y_t = sum_i w_i x_t-W+1+i over the tokens of t's document, (B, T, F), and the last W - 1 inputs; arguments
    as in `GatedDeltaNet.chunks`."""
    n_tokens, n_before = x_BTF.shape[1], filter_F1W.shape[-1] - 1
    first_BWF = x_BTF.new_zeros(x_BTF.shape[0], n_before, x_BTF.shape[2]) if before_BWF is None else before_BWF
    all_BUF = torch.cat((first_BWF.to(x_BTF.dtype), x_BTF), 1)
    y_BTF = x_BTF * filter_F1W[:, 0, n_before]
    for ago in range(1, n_before + 1):
        earlier_BTF = all_BUF[:, n_before - ago : n_before - ago + n_tokens]
        if document_BU is not None:
            start = document_BU.shape[1] - n_tokens
            same_BT = document_BU[:, start - ago : start - ago + n_tokens] == document_BU[:, start:]
            earlier_BTF = earlier_BTF * same_BT.unsqueeze(-1)
        y_BTF = y_BTF + earlier_BTF * filter_F1W[:, 0, n_before - ago]
    return y_BTF, all_BUF[:, n_tokens:]


class DeltaChunks(NamedTuple):
    """The tensors of the chunks of a sequence that no state changes; decayed, and 0 beyond a document."""

    u_BHNCV: Tensor
    w_BHNCK: Tensor
    """The solution of (I + L) u = beta v and (I + L) w = beta k: a chunk adds k^T (u - w S) to a state S before it."""
    q_BHNCK: Tensor
    k_BHNCK: Tensor
    scores_BHNCC: Tensor
    passed_BHN11: Tensor
    """The share of the state before a chunk that is left after it."""
    n_tokens: int


def delta_chunks(
    q_BHTK: Tensor,
    k_BHTK: Tensor,
    v_BHTV: Tensor,
    log_decay_BHT: Tensor,
    beta_BHT: Tensor,
    document_BU: Tensor | None = None,
) -> DeltaChunks:
    """Return the chunks of the gated delta rule; `document_BU` as in `GatedDeltaNet.chunks`: the state is zero before
    the first token of each document."""
    n_tokens = q_BHTK.shape[2]
    chunk = min(CHUNK, n_tokens)
    q, k, v, log_decay, beta = (_in_chunks(x, chunk) for x in (q_BHTK, k_BHTK, v_BHTV, log_decay_BHT, beta_BHT))
    total_BHNC = log_decay.cumsum(-1)
    last_BHN1 = total_BHNC[..., -1:]
    later_CC = torch.ones(chunk, chunk, dtype=torch.bool, device=q.device).triu(1)
    hidden, continues, stays = _within_documents(document_BU, n_tokens, chunk, later_CC)
    decay_BHNCC = (total_BHNC.unsqueeze(-1) - total_BHNC.unsqueeze(-2)).masked_fill(hidden, float("-inf")).exp()
    from_start_BHNC = total_BHNC.exp() * continues
    k_beta, v_beta = k * beta.unsqueeze(-1), v * beta.unsqueeze(-1)
    # (I + L) u = beta v and (I + L) w = beta k, decayed from the start of the chunk; L is strictly lower triangular.
    right = torch.cat((v_beta, k_beta * from_start_BHNC.unsqueeze(-1)), -1)
    solved = torch.linalg.solve_triangular(k_beta @ k.mT * decay_BHNCC, right, upper=False, unitriangular=True)
    u, w = solved.split((v.shape[-1], k.shape[-1]), -1)
    scores = q @ k.mT * decay_BHNCC
    q_start = q * from_start_BHNC.unsqueeze(-1)
    k_end = k * ((last_BHN1 - total_BHNC).exp() * stays).unsqueeze(-1)
    passed_BHN11 = from_start_BHNC[..., -1:].unsqueeze(-1)
    return DeltaChunks(u, w, q_start, k_end, scores, passed_BHN11, n_tokens)


def scan(chunks: DeltaChunks, state_BHKV: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Return the outputs of all tokens (B, H, T, V), and the state after the last token. `state_BHKV`: the state before
    the first token, zeros if None."""
    u, w, q_start, k_end, scores, passed, n_tokens = chunks
    if state_BHKV is None:
        state_BHKV = u.new_zeros(*u.shape[:2], w.shape[-1], u.shape[-1])
    outputs = []
    for n in range(u.shape[2]):
        change = u[:, :, n] - w[:, :, n] @ state_BHKV
        outputs.append(q_start[:, :, n] @ state_BHKV + scores[:, :, n] @ change)
        state_BHKV = state_BHKV * passed[:, :, n] + k_end[:, :, n].mT @ change
    return torch.stack(outputs, 2).flatten(2, 3)[:, :, :n_tokens], state_BHKV


def transition(chunks: DeltaChunks) -> Tensor:
    """Return (A, Z), (B, H, K, K + V), of all tokens together: they turn a state S before them into A S + Z."""
    u, w, _, k_end, _, passed, _ = chunks
    k_dim = w.shape[-1]
    unit_KK = torch.eye(k_dim, k_dim + u.shape[-1], dtype=u.dtype, device=u.device)
    state_BHKX = unit_KK.expand(*u.shape[:2], -1, -1)
    for n in range(u.shape[2]):
        change = F.pad(u[:, :, n], (k_dim, 0)) - w[:, :, n] @ state_BHKX
        state_BHKX = state_BHKX * passed[:, :, n] + k_end[:, :, n].mT @ change
    return state_BHKX


def _in_chunks(x_BHT: Tensor, chunk: int) -> Tensor:
    """Return (B, H, N, C, ...), with zeros after the last token, which change no state."""
    missing = -x_BHT.shape[2] % chunk
    padding = (0, 0) * (x_BHT.dim() - 3) + (0, missing)
    return (F.pad(x_BHT, padding) if missing else x_BHT).unflatten(2, (-1, chunk))


def _within_documents(
    document_BU: Tensor | None, n_tokens: int, chunk: int, later_CC: Tensor
) -> tuple[Tensor, Any, Any]:
    """Return which earlier tokens of a chunk are hidden from a token, and whether a token is of the document at the
    end of the previous chunk, and of the document at the end of its own."""
    if document_BU is None:
        return later_CC, 1, 1
    first_B1, document_BT = document_BU[:, -n_tokens - 1 : -n_tokens], document_BU[:, -n_tokens:]
    padded_BT = torch.cat((document_BT, document_BT[:, -1:].expand(-1, -n_tokens % chunk)), 1)
    document_B1NC = padded_BT.unflatten(1, (-1, chunk)).unsqueeze(1)
    ends_B1N1 = document_B1NC[..., -1:]
    before_B1N1 = torch.cat((first_B1[:, None, None], ends_B1N1[:, :, :-1]), 2)
    others = document_B1NC.unsqueeze(-1) != document_B1NC.unsqueeze(-2)
    return later_CC | others, document_B1NC == before_B1N1, document_B1NC == ends_B1N1


class _ComputedAgain(torch.autograd.Function):
    """A function of tensors that saves its inputs alone; the backward pass computes it again."""

    @staticmethod
    def forward(ctx: Any, compute: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
        ctx.compute = compute
        ctx.save_for_backward(*inputs)
        return compute(*inputs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        inputs = [x.detach().requires_grad_() for x in ctx.saved_tensors]
        with torch.enable_grad():
            output = ctx.compute(*inputs)
        return None, *torch.autograd.grad(output, inputs, grads[0])
