"""The choice of the next token from logits.

Draws are a function of (seed, index of the prompt, position), so that a continuation does not depend on the layout, on
the batch, or on the other prompts.

Shapes: N tokens to choose, V vocab.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from shardwright.model.random import sampling_uniform

DRAWN, PROPOSED, ACCEPTED, REPLACED = range(4)
"""The uses of the uniform numbers of a position: the token itself; in speculative decoding the draft model's proposal,
its acceptance, and its replacement if it is rejected."""


@dataclass(frozen=True)
class Sampling:
    """The parameters of drawing tokens. `temperature` None or 0: the most probable token (greedy); the other parameters
    are not used then.

    `top_k`: draw from this many most probable tokens; 0: all. `top_p`: from the most probable tokens whose
    probabilities together reach it (nucleus sampling, Holtzman et al., arXiv 1904.09751).
    """

    temperature: float | None = None
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        if self.temperature == 0:
            object.__setattr__(self, "temperature", None)

    def probabilities(self, logits_NV: Tensor) -> Tensor:
        """Return the distribution of each token in float64, (N, V); greedy choice has 1 for the most probable one."""
        logits_NV = logits_NV.double()
        if self.temperature is None:
            return torch.zeros_like(logits_NV).scatter_(-1, logits_NV.argmax(-1, keepdim=True), 1.0)
        logits_NV = logits_NV / self.temperature
        if 0 < self.top_k < logits_NV.shape[-1]:
            least_N1 = logits_NV.topk(self.top_k).values[:, -1:]
            logits_NV = logits_NV.masked_fill(logits_NV < least_N1, -torch.inf)
        p_NV = logits_NV.softmax(-1)
        if self.top_p < 1:
            sorted_NV, order_NV = p_NV.sort(dim=-1, descending=True, stable=True)
            # A token is kept until the probabilities of all more probable ones reach top_p.
            beyond_NV = sorted_NV.cumsum(-1) - sorted_NV >= self.top_p
            p_NV = p_NV.masked_fill(torch.empty_like(beyond_NV).scatter_(-1, order_NV, beyond_NV), 0)
            p_NV = p_NV / p_NV.sum(-1, keepdim=True)
        return p_NV

    def uniform(self, prompts: Sequence[int], positions: Sequence[int]) -> Tensor:
        """Return the uniform numbers of each position, (N, 4), in the order of DRAWN, PROPOSED, ACCEPTED, REPLACED."""
        return sampling_uniform(self.seed, torch.tensor(prompts), torch.tensor(positions), 4)

    def choose(self, logits_NV: Tensor, prompts: Sequence[int], positions: Sequence[int]) -> Tensor:
        """Return the token of each row, for `positions` of the continuation of `prompts`; (N,) int64."""
        if self.temperature is None:
            return logits_NV.argmax(-1)
        p_NV = self.probabilities(logits_NV)
        return draw(p_NV, self.uniform(prompts, positions)[:, DRAWN].to(p_NV.device))


def sampling_problems(
    temperature: float | None,
    top_k: int | None,
    top_p: float | None,
    written: Callable[[str, object], str] = "{}={}".format,
) -> list[str]:
    """Return one sentence for each value that `Sampling` cannot draw with. `written`: (name, value) -> the argument as
    the caller writes it; None is an argument that was not given."""
    problems = []
    if temperature is not None and not 0 <= temperature < float("inf"):
        which = written("temperature", f"{temperature:g}")
        problems.append(f"{which}: 0 (the most probable token) or more is needed")
    if top_p is not None and not 0 < top_p <= 1:
        which = written("top_p", f"{top_p:g}")
        problems.append(f"{which}: a probability above 0 and up to 1 is needed; 1 keeps all tokens")
    if top_k is not None and top_k < 0:
        problems.append(f"{written('top_k', top_k)}: 0 (all tokens) or a number of tokens is needed")
    return problems


def draw(p_NV: Tensor, u_N: Tensor) -> Tensor:
    """Return the token at which the cumulative distribution passes u, (N,): drawn from p if u is uniform in [0, 1)."""
    upto_NV = p_NV.cumsum(-1)
    whole_N = upto_NV[:, -1]  # 1, except for rounding
    below_N = torch.minimum(u_N * whole_N, whole_N.nextafter(torch.zeros_like(whole_N)))
    return torch.searchsorted(upto_NV, below_N[:, None], right=True)[:, 0]


def as_bits(values_N: Tensor) -> Tensor:
    """Return float64 values as integers, which `GenerationEngine.agree` sends; `from_bits` is the inverse."""
    return values_N.contiguous().view(torch.int64)


def from_bits(bits_N: Tensor) -> list[float]:
    """Return the values of `as_bits`."""
    values: list[float] = bits_N.contiguous().view(torch.float64).tolist()
    return values
