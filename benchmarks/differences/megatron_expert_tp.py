"""Megatron Core 0.16.1: with tp 2, ep 1 and experts that are not sharded over tp, the gradients of experts are not
reduced over tp.

    python megatron_expert_tp.py

needs megatron-core, and prints on two gloo ranks with tp 2 and sequence parallelism the gradient of an expert after the
library's DDP. Each rank has half of the tokens and a copy of the expert, so both gradients have to be the sum. DDP puts
a parameter with the mark `allreduce=False` among the experts, and the library sets the mark only where ep is above 1.
"""

import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.tensor_parallel import ColumnParallelLinear
from megatron.core.transformer import TransformerConfig

N_RANKS, WIDTH = 2, 4


def compare(rank: int, store: str) -> None:
    """Print the gradients on rank 0."""
    torch.cuda.current_device = lambda: torch.device("cpu")
    dist.init_process_group("gloo", f"file://{store}", rank=rank, world_size=N_RANKS)
    parallel_state.initialize_model_parallel(N_RANKS, expert_tensor_parallel_size=1)
    config = TransformerConfig(
        num_layers=1,
        hidden_size=WIDTH,
        num_attention_heads=2,
        num_moe_experts=2,
        tensor_model_parallel_size=N_RANKS,
        expert_tensor_parallel_size=1,
        sequence_parallel=True,
        use_cpu_initialization=True,
        gradient_accumulation_fusion=False,
        calculate_per_token_loss=True,
    )
    expert = ColumnParallelLinear(WIDTH, 1, config=config, init_method=torch.nn.init.ones_, bias=False, is_expert=True)
    model = DistributedDataParallel(config, DistributedDataParallelConfig(), expert)
    tokens = torch.arange(8.0).reshape(N_RANKS, WIDTH)
    model(tokens[rank : rank + 1])[0].sum().backward()
    model.finish_grad_sync()
    gradients = [torch.empty(1, WIDTH) for _ in range(N_RANKS)]
    dist.all_gather(gradients, expert.weight.main_grad)
    if rank == 0:
        print(
            f"gradients of the ranks: {[each.flatten().tolist() for each in gradients]}; sum: {tokens.sum(0).tolist()}"
        )
    dist.destroy_process_group()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        mp.start_processes(compare, (f"{folder}/store",), N_RANKS, start_method="fork")
