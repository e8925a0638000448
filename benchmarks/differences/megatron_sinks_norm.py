"""Megatron Core 0.16.1: with tp, the norm of the gradients counts the sinks of the first tp rank alone.

    python megatron_sinks_norm.py

needs megatron-core, and prints on two gloo ranks with tp 2 the norm of the gradients that the library counts and the
norm of all. The sinks of attention (`softmax_type="learnable"`) are sharded by heads, and their parameter has no mark
`tensor_model_parallel`, so the norm takes the shards of other ranks for copies. Clipping uses this norm.
"""

import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from megatron.core import parallel_state
from megatron.core.tensor_parallel import param_is_not_tensor_parallel_duplicate
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.enums import AttnMaskType

N_RANKS, N_HEADS = 2, 4


def compare(rank: int, store: str) -> None:
    """Print the norms on rank 0."""
    torch.cuda.current_device = lambda: torch.device("cpu")
    dist.init_process_group("gloo", f"file://{store}", rank=rank, world_size=N_RANKS)
    parallel_state.initialize_model_parallel(N_RANKS)
    config = TransformerConfig(
        num_layers=1,
        hidden_size=16,
        num_attention_heads=N_HEADS,
        tensor_model_parallel_size=N_RANKS,
        softmax_type="learnable",
        perform_initialization=False,
    )
    attention = DotProductAttention(config, 1, AttnMaskType.causal, "self")
    gradient = torch.arange(1.0, N_HEADS + 1)
    attention.softmax_offset.grad = gradient.chunk(N_RANKS)[rank].clone()
    # The library's optimizer counts the gradients for which the function is true.
    counted = [p.grad.square().sum() for p in attention.parameters() if param_is_not_tensor_parallel_duplicate(p)]
    square = torch.tensor(counted).sum()
    dist.all_reduce(square)
    if rank == 0:
        print(f"gradient of the sinks: {gradient.tolist()}; counted: {square.sqrt():.6f}; all: {gradient.norm():.6f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(compare, (f"{folder}/store",), N_RANKS)
