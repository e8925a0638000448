"""DeepSpeed 0.19.8 (#8475): without ZeRO the norm that clips gradients is the mean of the ranks' norms, also where each
rank has experts of its own.

    DS_ACCELERATOR=cpu python deepspeed_expert_norm.py

needs deepspeed, and prints on two gloo ranks with one expert each the norm that the library returns and the norm of all
gradients.
"""

import tempfile

import deepspeed
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from deepspeed.runtime.utils import clip_grad_norm_
from deepspeed.utils import groups

N_RANKS = 2


def compare(rank: int, store: str) -> None:
    """Print the norms on rank 0."""
    dist.init_process_group("gloo", f"file://{store}", rank=rank, world_size=N_RANKS)
    deepspeed.ops.__compatible_ops__.update(deepspeed_shm_comm=False)  # gloo instead of an extension to compile
    deepspeed.init_distributed("gloo", verbose=False)
    groups._create_expert_and_data_parallel(N_RANKS)
    shared, expert = (torch.nn.Parameter(torch.zeros(4)) for _ in range(2))
    expert.allreduce, expert.group_name = False, f"ep_size_{N_RANKS}"  # the marks of an expert
    shared.grad, expert.grad = torch.ones(4), torch.full((4,), 1.0 + 9.0 * rank)
    counted = clip_grad_norm_([shared, expert], max_norm=1e9)
    squares = expert.grad.square().sum()
    dist.all_reduce(squares)
    if rank == 0:
        print(f"norm of the library: {counted:.6f}; of all gradients: {(squares + 4).sqrt():.6f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        mp.start_processes(compare, (f"{folder}/store",), N_RANKS, start_method="fork")
