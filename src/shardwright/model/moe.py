"""A mixture of experts, which replaces the feed-forward network.

    y = sum over the K experts e of the token: weight_e * expert_e(x), + shared(x) or sigmoid(w x) * shared(x)

or with `scale_input` expert_e(weight_e * x).

Shapes: B sequences, T tokens of each, N = B T tokens, D model, E experts, K experts of a token, R = N K rows.
"""

from collections.abc import Mapping
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shardwright.model.balance import LayerLoad, RealTokens, Tally, attach, aux_loss, relative_load, update_bias, z_loss
from shardwright.model.expert_choices import ExpertChoices
from shardwright.model.experts import build_experts, combine, dispatch, sort_rows
from shardwright.model.feed_forward import FeedForward
from shardwright.model.random import uniform
from shardwright.model.recompute import decided
from shardwright.model.sections import MoESpec
from shardwright.model.spec import ModelSpec


class Routing(NamedTuple):
    """The result of a router: the experts of each token, their weights, the load and the losses."""

    experts_BTK: Tensor
    """int64"""
    weights_BTK: Tensor
    """fp32 or wider; 0 for dropped pairs and padding."""
    kept_BTK: Tensor | None
    """The pairs that an expert computes: neither dropped nor padding; None if experts compute all."""
    asked_BE: Tensor
    """Tokens of each sequence that picked each expert, without padding; int64."""
    given_E: Tensor
    """Tokens that each expert computes: the tokens that picked it, except dropped ones; int64."""
    aux_loss: Tensor | None
    """The balance loss with its coefficient, a mean over the local sequences; scalar, None outside of training or if it
    is off."""
    z_loss: Tensor | None
    """The z-loss, under the same conditions."""


class Router(nn.Module):
    """Picks K experts for every token and computes their weights, in fp32 or wider for any type of parameters.

        logits = x W^T + c    scores s = softmax(logits) or sigmoid(logits)      picked = top K of s + bias
        weight_e = scale * s_e / sum of s over picked, or scale * s_e

    With groups of experts, a token picks from its best groups. The score of a group is the score of its best expert for
    a softmax (DeepSeek-V2, arXiv 2405.04434, section 2.2.2) and the sum of its two best scores, with biases, for a
    sigmoid (DeepSeek-V3, arXiv 2412.19437, section 2.1.2).
    """

    def __init__(self, moe: MoESpec, d_model: int) -> None:
        super().__init__()
        self.moe, self.choices = moe, ExpertChoices()
        self.weight = nn.Parameter(torch.empty(moe.n_experts, d_model))
        self.logit_bias = nn.Parameter(torch.empty(moe.n_experts)) if moe.bias else None
        self.bias = nn.Parameter(torch.zeros(moe.n_experts), requires_grad=False) if moe.bias_rate else None
        # Load of the previous step, relative to the mean (`relative_load`).
        self.load = nn.Parameter(torch.ones(moe.n_experts), requires_grad=False) if moe.keeps_load else None

    def forward(
        self,
        x_BTD: Tensor,
        site_keys_B: Tensor | None = None,
        positions_T: Tensor | None = None,
        real: RealTokens | None = None,
    ) -> Routing:
        """Route every token of (B, T, D). With keys and global positions the experts are drawn, otherwise picked by
        score; the weights always follow from the scores. `real` and global positions: the sequences have padding, which
        no expert computes."""
        moe = self.moe
        wide = torch.promote_types(x_BTD.dtype, torch.float32)
        bias_E = None if self.logit_bias is None else self.logit_bias.to(wide)
        logits_BTE = F.linear(x_BTD.to(wide), self.weight.to(wide), bias_E)
        scores_BTE = logits_BTE.softmax(-1) if moe.score == "softmax" else logits_BTE.sigmoid()
        if site_keys_B is not None and positions_T is not None:
            experts_BTK = self.pick(uniform(site_keys_B, positions_T, moe.n_experts), biased=False)
        else:
            experts_BTK = decided(lambda: self.choices.choose(lambda: self.pick(scores_BTE.detach())))
        weights_BTK = scores_BTE.gather(-1, experts_BTK)
        if moe.normalise:
            weights_BTK = weights_BTK / (weights_BTK.sum(-1, keepdim=True) + 1e-20)
        weights_BTK = weights_BTK * moe.weight_scale
        real_BT = None if real is None or positions_T is None else real.mask(positions_T)
        asked_BE = count(experts_BTK, moe.n_experts, real_BT)
        kept_BTK, given_E = None, asked_BE.sum(0)
        if real_BT is not None:
            kept_BTK = real_BT.unsqueeze(-1).expand_as(experts_BTK)
        if moe.capacity_factor:
            within_BTK = self.keep(experts_BTK, real)
            kept_BTK = within_BTK if kept_BTK is None else within_BTK & kept_BTK
        if kept_BTK is not None:
            given_E = torch.zeros_like(given_E).scatter_add_(0, experts_BTK.flatten(), kept_BTK.flatten().long())
            weights_BTK = weights_BTK.masked_fill(~kept_BTK, 0.0)
        weights = (None, None) if real is None or real_BT is None else [real_BT * weight for weight in real.weights()]
        aux, z = self.losses(scores_BTE, logits_BTE, asked_BE, *weights) if self.training else (None, None)
        return Routing(experts_BTK, weights_BTK, kept_BTK, asked_BE, given_E, aux, z)

    def pick(self, scores_BTE: Tensor, biased: bool = True) -> Tensor:
        """Return the K different experts of every token, (B, T, K). The bias affects this choice, not the weights."""
        moe = self.moe
        ranked_BTE = scores_BTE + self.bias.to(scores_BTE.dtype) if biased and self.bias is not None else scores_BTE
        if moe.groups_per_token < moe.n_groups:
            ranked_BTGe = ranked_BTE.unflatten(-1, (moe.n_groups, -1))
            counted = 1 if moe.score == "softmax" else min(2, ranked_BTGe.shape[-1])
            best_BTG = ranked_BTGe.topk(counted).values.sum(-1)
            groups = best_BTG.topk(moe.groups_per_token).indices
            closed_BTG = torch.ones_like(best_BTG, dtype=torch.bool).scatter_(-1, groups, False)
            ranked_BTE = ranked_BTGe.masked_fill(closed_BTG.unsqueeze(-1), -torch.inf).flatten(-2)
        return ranked_BTE.topk(moe.top_k).indices

    def keep(self, experts_BTK: Tensor, real: RealTokens | None = None) -> Tensor:
        """Return which pairs are within the capacity of their expert, which keeps a sequence's first tokens; (B, T, K).

        Capacity is counted per sequence, so that dropped tokens do not depend on which sequences share a micro-batch or
        a rank. Padding follows the real tokens of its sequence, so it takes no place from them.
        """
        places_BTE = picked(experts_BTK, self.moe.n_experts).cumsum(1, dtype=torch.int32)
        return places_BTE.gather(-1, experts_BTK) <= self.capacity(experts_BTK.shape[1], real)

    def capacity(self, n_tokens: int, real: RealTokens | None) -> int | Tensor:
        """Return the capacity for sequences of `n_tokens`, or, with padding, for the real tokens of each, (B, 1, 1)."""
        if real is None:
            return self.moe.capacity(n_tokens)
        exact_B: Tensor = self.moe.exact_capacity(real.counts_B.double())
        return exact_B.ceil().view(-1, 1, 1)

    def losses(
        self,
        scores_BTE: Tensor,
        logits_BTE: Tensor,
        asked_BE: Tensor,
        aux_weights_BT: Tensor | None = None,
        z_weights_BT: Tensor | None = None,
    ) -> tuple[Tensor | None, Tensor | None]:
        """Return balance loss and z-loss of `Routing`. `asked_BE`: tokens of each sequence that picked each expert;
        `aux_weights_BT`, `z_weights_BT`: with padding, the weights of the tokens in each loss."""
        moe, aux, z = self.moe, None, None
        if moe.aux_loss:
            load = relative_load(asked_BE) if self.load is None else self.load
            aux = moe.aux_loss * aux_loss(scores_BTE, load, aux_weights_BT)
        if moe.z_loss:
            z = moe.z_loss * z_loss(logits_BTE, z_weights_BT)
        return aux, z

    @torch.no_grad()
    def learn(self, counts_E: Tensor) -> None:
        """Update the selection bias and the stored load after a step; `counts_E`: tokens of the whole global batch that
        picked each expert."""
        if self.bias is not None and self.weight.requires_grad:  # with adapters the bias is frozen as the weight is
            update_bias(self.bias, counts_E, self.moe.bias_rate)
        if self.load is not None:
            self.load.copy_(relative_load(counts_E))


def count(experts_BTK: Tensor, n_experts: int, real_BT: Tensor | None = None) -> Tensor:
    """Count the tokens of each sequence that picked each expert, only the real ones if given; (B, E) int64."""
    picked_BP = experts_BTK.flatten(1)
    if real_BT is None:
        ones_BP = torch.ones_like(picked_BP)
    else:
        ones_BP = real_BT.to(picked_BP.dtype).repeat_interleave(experts_BTK.shape[-1], 1)
    return picked_BP.new_zeros(picked_BP.shape[0], n_experts).scatter_add_(1, picked_BP, ones_BP)


def picked(experts_BTK: Tensor, n_experts: int) -> Tensor:
    """Return 1 for the experts that a token has picked, otherwise 0; (B, T, E) int32."""
    shape = (*experts_BTK.shape[:2], n_experts)
    return torch.zeros(shape, dtype=torch.int32, device=experts_BTK.device).scatter_(-1, experts_BTK, 1)


class SharedGate(nn.Module):
    """The factor of the shared experts' output, sigmoid(w x) (Qwen2-MoE). Unlike a router it decides nothing, so it is
    computed in the type of x, which saves a copy of x in fp32."""

    def __init__(self, d_model: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(1, d_model))

    def forward(self, x_BTD: Tensor) -> Tensor:
        """(B, T, D) -> (B, T, 1)."""
        return F.linear(x_BTD, self.weight.to(x_BTD.dtype)).sigmoid()


class MoE(nn.Module):
    """Router, experts and shared experts of one layer."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        assert spec.moe is not None
        self.router = Router(spec.moe, spec.d_model)
        self.experts: nn.Module = build_experts(spec)
        self.shared = FeedForward(spec, spec.moe.shared_width) if spec.moe.shared_width else None
        self.shared_gate = SharedGate(spec.d_model) if spec.moe.shared_gate else None
        self.tally = Tally()
        self.last_load: LayerLoad | None = None
        """The load of the last forward pass."""

    @property
    def drawn(self) -> bool:
        """Return whether experts are drawn, for which `forward` needs random keys and positions."""
        return self.router.moe.force_balance

    def forward(
        self,
        x_BTD: Tensor,
        site_keys_B: Tensor | None = None,
        positions_T: Tensor | None = None,
        real: RealTokens | None = None,
    ) -> Tensor:
        """(B, T, D) -> (B, T, D). Keys, positions and real tokens as in `Router.forward`; for padding the result is the
        output of the shared experts, or 0."""
        routing = self.router(x_BTD, site_keys_B, positions_T, real)
        experts_NK, weights_NK = routing.experts_BTK.flatten(0, 1), routing.weights_BTK.flatten(0, 1)
        kept_NK = None if routing.kept_BTK is None else routing.kept_BTK.flatten(0, 1)
        experts_NK, given_E = self.positions(experts_NK, routing.given_E)
        rows = sort_rows(experts_NK, kept_NK, routing.asked_BE.shape[1])
        of_inputs, of_outputs = (weights_NK, None) if self.router.moe.scale_input else (None, weights_NK)
        rows_RD = dispatch(x_BTD.flatten(0, 1), rows, of_inputs)
        y_RD, shared_BTD = self.run(rows_RD, given_E, x_BTD)
        y_BTD = combine(y_RD, of_outputs, rows).view_as(x_BTD)
        if shared_BTD is not None:
            y_BTD = y_BTD + shared_BTD
        losses = (routing.aux_loss, routing.z_loss)
        for loss in losses:
            if loss is not None:
                y_BTD = attach(y_BTD, loss)
        asked_E = routing.asked_BE.sum(0)
        nothing = torch.zeros((), dtype=routing.weights_BTK.dtype, device=x_BTD.device)
        values = [nothing if loss is None else loss.detach() for loss in losses]
        self.last_load = LayerLoad(asked_E, (asked_E - routing.given_E).sum(), *values)
        return y_BTD

    def positions(self, experts_NK: Tensor, given_E: Tensor) -> tuple[Tensor, Tensor]:
        """Return the positions of the experts in the matrices, (N, K), and the tokens of the expert at each, (E,)."""
        return experts_NK, given_E

    def run(self, rows_RD: Tensor, counts_E: Tensor, x_BTD: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return the experts' outputs for their rows, (R, D), and the shared experts' for all tokens, (B, T, D)."""
        return self.experts(rows_RD, counts_E), self.run_shared(x_BTD)

    def run_shared(self, x_BTD: Tensor) -> Tensor | None:
        """Return the shared experts' output for all tokens, multiplied by their gate, (B, T, D); None without them."""
        if self.shared is None:
            return None
        y_BTD: Tensor = self.shared(x_BTD)
        return y_BTD if self.shared_gate is None else y_BTD * self.shared_gate(x_BTD)


def expert_layers(model: nn.Module) -> dict[str, MoE]:
    """Return the mixtures of a model, or of a pipeline stage, by the number of their layer in the whole model."""
    mixtures = {name: module for name, module in model.named_modules() if isinstance(module, MoE)}
    return {name.removeprefix("layers.").split(".")[0]: module for name, module in mixtures.items()}


def take_load(model: nn.Module) -> dict[str, LayerLoad]:
    """Return the load of each layer in the backward passes since the last call, by the number of the layer."""
    taken = {name: layer.tally.take() for name, layer in expert_layers(model).items()}
    return {name: load for name, load in taken.items() if load is not None}


def learn_from_load(model: nn.Module, counts: Mapping[str, Tensor]) -> None:
    """Update the routers from the load of the whole global batch: `counts` (E,) by the number of the layer."""
    layers = expert_layers(model)
    for name, counts_E in counts.items():
        layers[name].router.learn(counts_E)
