"""torchtitan 0.3.0 on PyTorch 2.13: with spmd_backend full_dtensor the logged loss is multiplied by the data ranks.

    python torchtitan_logged_loss.py

needs torchtitan and triton, and prints on two gloo ranks the loss that torchtitan logs and the loss of plain PyTorch.
Gradients are right. `Trainer.train_step` keeps a clone of the loss, whose placement is Partial. PyTorch 2.13 makes the
clone Replicate. `dist_sum` takes its local value for a part and adds the ranks' values.
"""

import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torchtitan.components.loss import CrossEntropyLoss
from torchtitan.distributed.utils import dist_sum

N_RANKS, N_SEQUENCES, N_TOKENS, VOCABULARY = 2, 4, 8, 16


def compare(rank: int, store: str) -> None:
    """Print the losses on rank 0."""
    dist.init_process_group("gloo", f"file://{store}", rank=rank, world_size=N_RANKS)
    mesh = init_device_mesh("cpu", (N_RANKS,), mesh_dim_names=("dp_shard",))
    torch.manual_seed(0)
    logits = torch.randn(N_SEQUENCES, N_TOKENS, VOCABULARY, dtype=torch.float64)
    labels = torch.randint(VOCABULARY, (N_SEQUENCES, N_TOKENS))
    local = [DTensor.from_local(whole.chunk(N_RANKS)[rank], mesh, [Shard(0)]) for whole in (logits, labels)]
    loss, _ = CrossEntropyLoss(CrossEntropyLoss.Config())(*local, torch.tensor(labels.numel()))
    kept = loss.detach().clone()
    logged = dist_sum(kept, mesh)
    by_hand = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()).item()
    if rank == 0:
        print(
            f"loss: {loss.placements}; its clone: {kept.placements}; logged: {logged:.6f}; plain PyTorch: {by_hand:.6f}"
        )
    dist.destroy_process_group()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(compare, (f"{folder}/store",), N_RANKS)
