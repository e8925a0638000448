"""A training loop of your own, on two ranks.

torchrun --nproc-per-node 2 examples/own_loop.py
"""

import torch

import shardwright

layout = shardwright.Layout(dp_shard=2)  # with tp=2, cp=2 or pp=2 the loop below stays as it is
model = shardwright.parallelize("debug", layout, seq_len=64, device="cpu")
optimizer = torch.optim.AdamW(model.parameter_groups(weight_decay=0.1), lr=3e-3)
generator = torch.Generator().manual_seed(model.data_rank)  # ranks of one data rank read the same sequences

for step in range(60):
    first = torch.randint(512, (8, 1), generator=generator)
    sequences = (first + torch.arange(65)) % 512  # counting: the next token is the last one plus 1
    loss = model.forward_backward(sequences[:, :-1], sequences[:, 1:], micro_batch=4)
    norm = model.clip_grad_norm(1.0)
    optimizer.step()
    if step % 10 == 9 and model.rank == 0:
        print(f"step {step + 1}: loss {loss.item():.3f}, gradient norm {norm.item():.3f}")
