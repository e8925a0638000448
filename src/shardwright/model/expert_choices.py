"""Records the experts that routers choose, and replays choices instead of a router's top K.

In reinforcement learning the sampler and the trainer round differently, so a token may get other experts in training
than in generation, which changes its log-probability by much more than rounding. With replay the trainer uses the
sampler's experts; their weights still follow from the scores of the current router, with gradients (rollout routing
replay, arXiv 2510.11370, section 3).

Shapes: A micro-batches, B sequences, T tokens of each (local), L layers with experts, K experts of a token.
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from shardwright.model.spec import ModelSpec

UNKNOWN = -1
"""A choice that is not replayed: the router picks the expert, as for padding."""


class ExpertChoices:
    """The choices that one router takes in its next forward passes, and the choices that it has made."""

    def __init__(self) -> None:
        self._given: deque[Tensor] = deque()
        self._made: list[Tensor] | None = None

    def choose(self, pick: Callable[[], Tensor]) -> Tensor:
        """Return the experts of each token (B, T, K): the next given choices, otherwise `pick()`."""
        experts_BTK = pick()
        if self._given:
            given_BTK = self._given.popleft()
            assert given_BTK.shape == experts_BTK.shape, (given_BTK.shape, experts_BTK.shape)
            experts_BTK = given_BTK.where(given_BTK != UNKNOWN, experts_BTK)
        if self._made is not None:
            self._made.append(experts_BTK)
        return experts_BTK

    def give(self, experts_ABTK: Sequence[Tensor]) -> None:
        """Set the choices of the next forward passes, int64."""
        self._given.extend(experts_ABTK)

    def withdraw(self) -> int:
        """Forget the choices that no pass has taken; return their number."""
        n_left = len(self._given)
        self._given.clear()
        return n_left

    def record(self, wanted: bool) -> list[Tensor]:
        """Start or end recording; return the choices recorded so far."""
        made, self._made = self._made or [], [] if wanted else None
        return made


def layers_with_experts(spec: ModelSpec) -> list[int]:
    """Return the numbers of the layers that have experts; multi-token prediction modules are not counted."""
    return [layer for layer in range(spec.n_layers) if spec.has_experts(layer)]


def choice_shape(spec: ModelSpec) -> tuple[int, int]:
    """Return (L, K) of a model with experts."""
    assert spec.moe is not None
    return len(layers_with_experts(spec)), spec.moe.top_k


def choices_of_layers(parts: Sequence[nn.Module], spec: ModelSpec) -> dict[int, ExpertChoices]:
    """Return the choices of the routers of a model's parts by their place among the layers with experts."""
    places = {f"layers.{layer}.": place for place, layer in enumerate(layers_with_experts(spec))}
    choices = {}
    for part in parts:
        for name, module in part.named_modules():
            if isinstance(of_router := getattr(module, "choices", None), ExpertChoices):
                place = next((place for prefix, place in places.items() if name.startswith(prefix)), None)
                if place is not None:
                    choices[place] = of_router
    return choices


@contextmanager
def replayed(parts: Sequence[nn.Module], spec: ModelSpec, experts_ABTLK: Sequence[Tensor] | None) -> Iterator[None]:
    """Replay the choices of this rank's tokens, a tensor for each micro-batch, in the passes of the block."""
    if experts_ABTLK is None:
        yield
        return
    layers = choices_of_layers(parts, spec)
    for place, choices in layers.items():
        choices.give([experts_BTLK[:, :, place] for experts_BTLK in experts_ABTLK])
    done = False
    try:
        yield
        done = True
    finally:
        n_left = sum([choices.withdraw() for choices in layers.values()])
        assert not done or not n_left, f"{n_left} choices were not replayed"


@contextmanager
def recorded(parts: Sequence[nn.Module], spec: ModelSpec, wanted: bool = True) -> Iterator[dict[int, list[Tensor]]]:
    """Record the choices (B, T, K) of each pass of the block, by the place of the layer among the layers with experts;
    complete after the block."""
    layers = choices_of_layers(parts, spec) if wanted else {}
    made: dict[int, list[Tensor]] = {}
    for choices in layers.values():
        choices.record(True)
    try:
        yield made
    finally:
        made.update({place: choices.record(False) for place, choices in layers.items()})


def choice_problems(spec: ModelSpec, experts_TLK: Tensor) -> list[str]:
    """Return why choices (..., L, K) cannot be replayed, one sentence each."""
    if spec.moe is None:
        return ["the model has no experts, so no choices of experts can be replayed"]
    (n_layers, top_k), n_experts = choice_shape(spec), spec.moe.n_experts
    if experts_TLK.shape[-2:] != (n_layers, top_k):
        return [
            f"choices of {' x '.join(map(str, experts_TLK.shape[-2:]))} experts a token, and the model has {n_layers} "
            f"layers with experts and {top_k} experts of a token in each"
        ]
    if experts_TLK.is_floating_point():
        return [f"choices of type {experts_TLK.dtype}: integers are needed"]
    low, high = (int(experts_TLK.min()), int(experts_TLK.max())) if experts_TLK.numel() else (0, 0)
    if low < UNKNOWN or high >= n_experts:
        return [
            f"a choice of expert {low if low < UNKNOWN else high}; valid: 0 to {n_experts - 1}, or -1: not replayed"
        ]
    sorted_TLK = experts_TLK.sort(-1).values
    if bool(((sorted_TLK[..., 1:] == sorted_TLK[..., :-1]) & (sorted_TLK[..., 1:] >= 0)).any()):
        return ["a token has one expert twice in a layer; its experts have to be different"]
    some_TL = (experts_TLK == UNKNOWN).any(-1)
    if bool((some_TL & (experts_TLK != UNKNOWN).any(-1)).any()):
        return ["a token has -1 for some of its experts in a layer; give all of them or none"]
    return []


def padded_choices(experts_NLK: Tensor, n_tokens: int) -> Tensor:
    """Return the choices of `n_tokens` tokens (n_tokens, L, K) int64, `UNKNOWN` for padding."""
    missing = n_tokens - len(experts_NLK)
    padding = experts_NLK.new_full((missing, *experts_NLK.shape[1:]), UNKNOWN)
    return torch.cat((experts_NLK, padding)).long()
