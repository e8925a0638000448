"""Rotary position embedding (Su et al., arXiv 2104.09864), with the scalings of frequencies for longer contexts.

Element i of a head is paired with element i + C/2, the order of Hugging Face's weights.

Shapes: B batch, T tokens, H heads, C rotated elements of one head: `rope_dim`, usually the whole head. The others
follow them (`rope_fraction`).
"""

import math
from dataclasses import replace

import torch
from torch import Tensor

from shardwright.model.sections import RopeScaling
from shardwright.model.spec import ModelSpec


def frequencies(spec: ModelSpec, device: torch.device | str = "cpu", n_tokens: int = 0) -> Tensor:
    """Return the radians by which each pair is rotated per position, in a sequence of `n_tokens` tokens; float64
    (C/2,).

    f_i = theta ** (-2i / C), i = 0 .. C/2 - 1. With scaling, f_i (kept_i + (1 - kept_i) / factor):

    linear  kept = 0 (Chen et al., arXiv 2306.15595)
    llama3  kept rises linearly from 0 to 1 in the turns f_i s / 2 pi of a pair, from `low_freq_factor` to
            `high_freq_factor`, or at once if they are equal (Llama 4); s is `original_max_seq_len` (Llama 3.1
            reference code)
    yarn    kept falls linearly from 1 to 0 in i, between the pairs with `beta_fast` and `beta_slow` turns (YaRN, arXiv
            2309.00071, section 3.2, with the bounds in i of its code)

    dynamic (NTK) changes frequencies only beyond `max_seq_len`, so f_i stays; longrope divides f_i by number i of
    `short_factor`, or of `long_factor` in sequences of more than `original_max_seq_len` tokens (LongRoPE, arXiv
    2402.13753, as in transformers).
    """
    exponents = torch.arange(0, spec.rope_dim, 2, device=device, dtype=torch.float64) / spec.rope_dim
    turning = spec.rope_theta**-exponents
    scaling = spec.rope_scaling
    if scaling is None or scaling.kind == "dynamic":
        return turning
    if scaling.kind == "longrope":
        return turning / torch.tensor(scaling.factors(n_tokens), device=device, dtype=torch.float64)
    if scaling.kind == "linear":
        return turning / scaling.factor
    if scaling.kind == "yarn":
        first, last = _yarn_bounds(scaling, spec)
        pairs = torch.arange(len(turning), device=device, dtype=torch.float64)
        kept = 1 - ((pairs - first) / (last - first)).clamp(0, 1)
    else:
        turns = turning * (scaling.original_max_seq_len / (2 * math.pi))
        width = scaling.high_freq_factor - scaling.low_freq_factor
        kept = ((turns - scaling.low_freq_factor) / width).clamp(0, 1)
    return turning * ((1 - kept) / scaling.factor + kept)


def _yarn_bounds(scaling: RopeScaling, spec: ModelSpec) -> tuple[float, float]:
    """Return the pairs i between which YaRN interpolates: the pairs with `beta_fast` and with `beta_slow` turns in the
    original context, i = C ln(s / (2 pi turns)) / (2 ln theta); with `truncate`, rounded outwards to whole pairs."""

    def pair(turns: float) -> float:
        length = scaling.original_max_seq_len / (2 * math.pi * turns)
        return spec.rope_dim * math.log(length) / (2 * math.log(spec.rope_theta))

    first, last = pair(scaling.beta_fast), pair(scaling.beta_slow)
    if scaling.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, spec.rope_dim - 1)
    return first, last if last != first else last + 0.001  # a step, as in the code of the authors


def rotary_table(spec: ModelSpec, positions_T: Tensor, dtype: torch.dtype, n_tokens: int | None = None) -> Tensor:
    """Return cosines, and sines with the sign of the rotation, for any positions in any order; (2, T, 1, C), or
    (2, B, T, 1, C) for positions (B, T).

    Angles are computed in float64 and rounded once to `dtype`. The table is computed in every forward pass and not
    stored, so `to_empty`, a move to another device or a dry run cannot leave a wrong one. It includes the factor of
    queries and keys of YaRN and LongRoPE. `n_tokens`: the tokens of the whole sequence, if it has more than these.
    With `window_rope_theta` two tables are stacked: of other layers, and of windowed layers.
    """
    n_tokens = positions_T.shape[-1] if n_tokens is None else n_tokens
    if spec.window_rope_theta:
        local = replace(spec, rope_theta=spec.window_rope_theta, rope_scaling=None, window_rope_theta=0.0)
        specs = replace(spec, window_rope_theta=0.0), local
        return torch.stack([rotary_table(spec, positions_T, dtype, n_tokens) for spec in specs])
    angles_TC = positions_T[..., None].to(torch.float64) * frequencies(spec, positions_T.device, n_tokens)
    cos_TC, sin_TC = angles_TC.cos(), angles_TC.sin()
    table = torch.stack((torch.cat((cos_TC, cos_TC), -1), torch.cat((-sin_TC, sin_TC), -1)))
    if spec.rope_scaling is not None:
        table = table * spec.rope_scaling.attention_scale
    return table.to(dtype).unsqueeze(-2)


def query_temperature(spec: ModelSpec, positions_T: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the factor of queries in layers that rotate nothing, (T, 1, 1), or (B, T, 1, 1) for positions (B, T):
    1 + a ln(1 + floor((p + 1) / n)) with a `temperature_scale` and n `temperature_interval` (Llama 4 in transformers;
    after Nakanishi, arXiv 2501.19399). Queries of `dtype` are multiplied by it in fp32 or wider."""
    steps_T = (positions_T + 1) // spec.temperature_interval
    return (1 + spec.temperature_scale * steps_T.double().log1p()).to(torch.promote_types(dtype, torch.float32))[
        ..., None, None
    ]


def rotate(x_BTHC: Tensor, rotary_2TC: Tensor) -> Tensor:
    """Rotate each pair of a head by the angle of its position; elements after the C of the table stay as they are.

    A roll by half a head swaps the elements of every pair; the sign is in the table. On a CPU this took
    0.90 ms forward and backward for the 12 heads of the benchmark's layer, against 1.07 ms with
    split, negation and concatenation.
    """
    rotated = rotary_2TC.shape[-1]
    if rotated < x_BTHC.shape[-1]:
        return torch.cat((rotate(x_BTHC[..., :rotated], rotary_2TC), x_BTHC[..., rotated:]), -1)
    cos_TC, sin_TC = rotary_2TC.unbind(0)
    return torch.addcmul(x_BTHC * cos_TC, x_BTHC.roll(x_BTHC.shape[-1] // 2, -1), sin_TC)
