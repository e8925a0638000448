"""Proves that AdamW with 8-bit states rounds by the table and the blocks of its paper, beside a version by hand; that
each layout takes the steps of one process is proven with the other optimizers in test_optimizers.py."""

import pytest
import torch
from torch import Tensor

from shardwright.model.modules import rows
from shardwright.training.optimizer import build_optimizer, named_state
from shardwright.training.optimizers.adamw_8bit import table
from tests.training.bugs.bug import EVEN
from tests.training.test_optimizers import (
    BETA1,
    BETA2,
    DECAY,
    EPS,
    LR,
    STEPS,
    WITHOUT_DEFAULTS,
    gradient_of,
    section,
    trained,
    whole_parameters,
)

RUN = WITHOUT_DEFAULTS["adamw-8bit"]
BLOCK, LEAST = (int(RUN.options[name]) for name in ("block_size", "least_elements"))


def decoded(code: int, signed: bool) -> float:
    """The number of 8 bits (arXiv 2110.02861, section 1.3): a sign, zeros as the exponent of 10, a 1, and the place
    among equal parts of 0.1 to 1. All zeros are 0, and a sign and nothing else is 1; unsigned, the 0 is all zeros, and
    what the sign would have been is a bit of the place."""
    n_bits = 7 if signed else 8
    rest = code % 2**n_bits
    if rest == 0:
        return 0.0 if code == 0 else 1.0
    zeros = n_bits - rest.bit_length()
    n_parts = 2 ** (n_bits - 1 - zeros)
    middle = 0.1 + 0.9 * (rest - n_parts + 0.5) / n_parts
    return (-1.0 if code >= 2**n_bits else 1.0) * middle * 10.0**-zeros


def test_the_signed_table_is_that_of_dynamic_tree_quantisation() -> None:
    torch.testing.assert_close(table(signed=True).tolist(), sorted(decoded(code, True) for code in range(256)))


def test_the_unsigned_table_has_a_bit_more_of_place_and_as_many_exponents() -> None:
    """Its smallest number, the only one with an eighth exponent, is 1 instead, as in bitsandbytes."""
    expected = sorted(1.0 if code == 1 else decoded(code, False) for code in range(256))
    torch.testing.assert_close(table(signed=False).tolist(), expected)


def rounded(x: Tensor, signed: bool) -> Tensor:
    """Each block of each row to the nearest numbers of the table times the largest of the block, one after another."""
    numbers, result = table(signed), torch.zeros_like(x)
    for row, into in zip(x.reshape(-1, x.shape[-1]), result.view(-1, x.shape[-1]), strict=True):
        for start in range(0, len(row), BLOCK):
            block = row[start : start + BLOCK]
            largest = block.abs().max()
            if largest > 0:
                distance = (block[:, None] / largest - numbers).abs()
                if not signed:
                    distance[block > 0, 0] = torch.inf
                into[start : start + BLOCK] = numbers[distance.argmin(1)] * largest
    return result


def test_moments_are_rounded_in_blocks_of_rows_after_the_step_has_used_them() -> None:
    """Also where a row is no multiple of a block, a whole block is zero, and a matrix is too small to be rounded."""
    found, optimizer = trained(EVEN, RUN)
    states, sizes = named_state(optimizer, found.items()), set()
    for name, p in whole_parameters(EVEN).items():
        w, m, v = p.detach().clone(), torch.zeros_like(p), torch.zeros_like(p)
        coded = p.dim() > 1 and p.numel() >= LEAST
        sizes.add((coded, p.shape[-1] % BLOCK == 0))
        for step in range(STEPS):
            g = gradient_of(name, p, step)
            m, v = BETA1 * m + (1 - BETA1) * g, BETA2 * v + (1 - BETA2) * g**2
            w *= 1 - LR * (DECAY if p.dim() > 1 else 0.0)
            w -= LR * (m / (1 - BETA1 ** (step + 1))) / ((v / (1 - BETA2 ** (step + 1))).sqrt() + EPS)
            if coded:
                m, v = rounded(m, signed=True), rounded(v, signed=False)
        torch.testing.assert_close(found[name].detach(), w, rtol=1e-10, atol=1e-12)
        assert states[f"exp_avg/{name}"].dtype == (torch.uint8 if coded else torch.float64), name
        assert (f"exp_avg_scale/{name}" in states) == coded
    assert {(True, True), (True, False)} <= sizes
    assert any(not coded for coded, _ in sizes)


def test_small_tensors_have_states_of_32_bits() -> None:
    """As by default: nothing of a model of matrices below 4096 elements is rounded."""
    parameters = whole_parameters(EVEN)
    states = named_state(build_optimizer(parameters, EVEN, section("adamw-8bit")), parameters.items())
    assert max(p.numel() for p in parameters.values()) < 4096
    assert not any(name.endswith("scale") or state.dtype == torch.uint8 for name, state in states.items())


def test_a_matrix_of_the_least_elements_has_8_bits() -> None:
    kind, row = RUN.kind, rows(EVEN)["layers.0.attention.q.weight"]
    assert [kind.has_codes(row, {"least_elements": row.numel + more}) for more in (0, 1)] == [True, False]


@pytest.mark.parametrize("size", [1e-20, 1e-15, 1e15])
def test_blocks_of_very_small_and_large_gradients_are_rounded_as_any(size: float) -> None:
    """In fp32, where 1 / 1e-40 is infinite; and a second moment that is not 0 is not rounded to 0."""
    name = "layers.0.attention.q.weight"
    weights = torch.nn.Parameter(torch.zeros(rows(EVEN)[name].shape))
    optimizer = build_optimizer({name: weights}, EVEN, RUN)
    weights.grad = size * torch.logspace(0, -6, BLOCK).repeat(32, 2)
    optimizer.step()
    assert torch.isfinite(weights).all()
    states = named_state(optimizer, [(name, weights)])
    assert (states[f"exp_avg_sq/{name}"][weights.grad.square() * (1 - BETA2) > 1e-44] > 0).all()
    numbers = table(signed=True).float()[states[f"exp_avg/{name}"].int()]
    assert numbers[0, :BLOCK].max() == 1
