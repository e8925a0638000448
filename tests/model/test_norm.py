"""Proves that the norm with a backward pass of its own, on a CPU, is PyTorch's."""

import torch
from torch import Tensor, nn

from shardwright.model.norm import RMSNorm


def test_the_norm_and_its_gradients_are_those_of_pytorch():
    generator = torch.Generator().manual_seed(0)
    x_BTD, dy_BTD = (torch.randn(2, 5, 12, generator=generator, dtype=torch.float64) for _ in range(2))
    found: list[tuple[Tensor, ...]] = []
    for kind in (RMSNorm, nn.RMSNorm):
        norm = kind(12, eps=0.1).double()
        norm.weight.data = torch.arange(-3.0, 9.0, dtype=torch.float64)
        x_BTD = x_BTD.detach().requires_grad_()
        y_BTD = norm(x_BTD)
        found.append((y_BTD, *torch.autograd.grad(y_BTD, (x_BTD, norm.weight), dy_BTD)))
    assert "_RMSNorm" in type(found[0][0].grad_fn).__name__
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-13, atol=1e-14)
