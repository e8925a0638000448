"""DeepSpeed 0.19.8: without ZeRO a pipeline clips by the norm of its first stage's gradients.

    DS_ACCELERATOR=cpu python deepspeed_pipeline_norm.py

needs deepspeed, and prints on two gloo ranks with a stage each the norm of an update by SGD with learning rate 1, and
the norm to which gradients are clipped: half the norm that plain PyTorch computes in one process. The two are equal in
plain PyTorch. `clip_grad_norm_` counts a parameter on the first rank of `get_model_parallel_group` alone, unless it is
marked as sharded over tensor parallelism. In a pipeline that group has a rank for each stage.
"""

import os
import tempfile

import deepspeed
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from deepspeed.pipe import PipelineModule
from torch import nn

N_RANKS, N_SEQUENCES, WIDTH = 2, 4, 8


def layers() -> list[nn.Module]:
    """Return the same layers on each rank."""
    torch.manual_seed(0)
    return [nn.Linear(WIDTH, WIDTH) for _ in range(N_RANKS)]


def compare(rank: int, store: str) -> None:
    """Print the norms on rank 0."""
    os.environ["LOCAL_RANK"] = str(rank)
    dist.init_process_group("gloo", f"file://{store}", rank=rank, world_size=N_RANKS)
    deepspeed.ops.__compatible_ops__.update(deepspeed_shm_comm=False)  # gloo instead of an extension to compile
    deepspeed.init_distributed("gloo", verbose=False)
    whole = nn.Sequential(*layers())
    x, target = torch.randn(2, N_SEQUENCES, WIDTH).unbind()
    nn.functional.mse_loss(whole(x), target).backward()
    limit = nn.utils.get_total_norm([p.grad for p in whole.parameters()]).item() / 2
    model = PipelineModule(layers(), N_RANKS, loss_fn=nn.functional.mse_loss, partition_method="uniform")
    config = {"train_micro_batch_size_per_gpu": N_SEQUENCES, "gradient_clipping": limit}
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    before = [p.detach().clone() for p in model.parameters()]
    engine.train_batch(iter([(x, target)]))
    square = sum((p.detach() - old).square().sum() for p, old in zip(model.parameters(), before, strict=True))
    dist.all_reduce(square)
    if rank == 0:
        print(f"norm of the update: {square.sqrt():.6f}; gradients are clipped to: {limit:.6f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        mp.start_processes(compare, (f"{folder}/store",), N_RANKS, start_method="fork")
