"""Megatron Core 0.16.1: with tp, the norm of the gradients counts the sinks of the first tp rank alone.

    python megatron_sinks_norm.py

needs megatron-core, and prints on two gloo ranks with tp 2 the norm of the library and of plain PyTorch. The sinks of
attention (`softmax_type="learnable"`) are sharded by heads, and their parameter has no mark `tensor_model_parallel`, so
the norm takes the shards of other ranks for copies. The library's clipping uses this norm.
"""

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from megatron.core import parallel_state
from megatron.core.optimizer.clip_grads import get_grad_norm_fp32
from megatron.core.tensor_parallel import param_is_not_tensor_parallel_duplicate
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.enums import AttnMaskType

N_RANKS, N_HEADS = 2, 4


def compare(rank: int, port: int) -> None:
    """Print the norms on rank 0."""
    torch.cuda.current_device = lambda: torch.device("cpu")
    torch.Tensor.cuda = lambda tensor, *_, **__: tensor
    dist.init_process_group("gloo", f"tcp://127.0.0.1:{port}", rank=rank, world_size=N_RANKS)
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
    # The optimizer passes the gradients for which this is true to the norm.
    counted = [p.grad for p in attention.parameters() if param_is_not_tensor_parallel_duplicate(p)]
    norm = get_grad_norm_fp32(counted, grad_stats_parallel_group=parallel_state.get_tensor_model_parallel_group())
    if rank == 0:
        print(f"gradient of the sinks: {gradient.tolist()}; library: {norm:.6f}; plain PyTorch: {gradient.norm():.6f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    mp.spawn(compare, (29562,), N_RANKS)
