"""The activations that one layer keeps for the backward pass in bf16: counted, and by a formula; for other scripts.

The counting is that of tests/parallel/test_tensor.py, whose formula is for one type of numbers. In bf16 a part of what
is kept is wider. Bytes a token, with t = tp:

    residual stream   20 D + 8                each norm: its input and that over the root mean square in fp32, the
                                              mean square's root in fp32; and in bf16 the input of the matmuls
    heads             (4 H C + 4 H) / t       queries and the output in bf16, the log-sum-exp in fp32
    kv heads          4 max(K / t, 1) C       keys and values in bf16
    network           8 F / t                 gate, up, the gate's activation and the product, in bf16

The residual stream's part is cut by t with sequence parallelism only. The fp32 parts are those of PyTorch's norm on a
CPU; a fused norm keeps its bf16 input alone, and 20 D becomes 8 D, which is what Korthikanti et al. count for GPT
(arXiv 2205.05198, section 4.1, less the masks of dropout). D d_model, H heads, K kv heads, C width of a head, F d_ffn.
"""

from dataclasses import replace
from unittest.mock import patch

import torch
from tests.distributed import run_ranks
from tests.parallel import test_tensor as tensor
from torch import Tensor

from shardwright.layout.layout import Layout
from shardwright.model.spec import ModelSpec
from shardwright.parallel.apply import apply
from shardwright.parallel.model import ParallelModel


def formula_bytes(spec: ModelSpec, layout: Layout) -> float:
    """Of one token in one layer, by the formula above."""
    t = layout.tp
    residual = 20 * spec.d_model + 8
    heads = 4 * spec.n_heads * spec.head_dim + 4 * spec.n_heads + 8 * spec.d_ffn
    kv_heads = 4 * max(spec.n_kv_heads / t, 1) * spec.head_dim
    return residual / (t if layout.token_shards else 1) + heads / t + kv_heads


def counted_bytes(layout: Layout) -> float:
    """Of one token in one layer of the tests' model, as counted: three layers less two."""
    two, three = (run_ranks(_saved_bytes, layout.tp, layout, n)[0] for n in (2, 3))
    return (three - two) / (tensor.B * tensor.T)


def _saved_bytes(layout: Layout, n_layers: int) -> int:
    with patch.object(tensor, "built", _built_in_bf16):
        return tensor.saved_bytes(layout, n_layers)


def _built_in_bf16(layout: Layout, n_layers: int) -> tuple[ParallelModel, Tensor]:
    spec = replace(tensor.WIDE, n_layers=n_layers)
    kind = torch.bfloat16
    model = apply(spec, layout, torch.device("cpu"), seed=1, param_dtype=kind, compute_dtype=kind)
    return model, torch.zeros(tensor.B, tensor.T, dtype=torch.int64)
