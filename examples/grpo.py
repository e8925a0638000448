"""GRPO in a training loop of your own, on two ranks: the reward of generated answers rises.

torchrun --nproc-per-node 2 examples/grpo.py

The task: repeat the token of the prompt. Each step generates a group of answers for each prompt, scores them, and
updates the model twice on the same answers, with the clipped objective of Shao et al., arXiv 2402.03300, equation 3,
without its KL term. Advantages are rewards minus the mean of the group, over its standard deviation.
"""

import torch

import shardwright

N_TOKENS, PROMPTS, GROUP, STEPS, CLIP = 4, 16, 8, 20, 0.2  # PROMPTS: of all data ranks together
spec = shardwright.ModelSpec(
    n_layers=1, d_model=16, n_heads=2, n_kv_heads=2, head_dim=8, d_ffn=64, vocab_size=8, max_seq_len=8
)


def rewards(prompts: torch.Tensor, answers: torch.Tensor) -> torch.Tensor:
    """Return the share of the tokens of each answer (B, T) that equal the token of its prompt (B,)."""
    return (answers == prompts[:, None]).double().mean(1)


def run(layout: shardwright.Layout, steps: int = STEPS) -> list[float]:
    """Train on this rank of a layout; return the mean reward of each step on this data rank."""
    model = shardwright.parallelize(spec, layout, seq_len=N_TOKENS, device="cpu")
    optimizer = torch.optim.AdamW(model.parameter_groups(weight_decay=0.0), lr=3e-2)
    generator = torch.Generator().manual_seed(model.data_rank)  # ranks of one data rank read the same prompts
    history = []
    for step in range(steps):
        # Generate a group of answers for each prompt of this data rank.
        prompts = torch.randint(spec.vocab_size, (PROMPTS // layout.data_ranks,), generator=generator)
        prompts = prompts.repeat_interleave(GROUP)
        drawn = model.generate(prompts[:, None].tolist(), N_TOKENS, seed=step)
        answers = torch.tensor([each.tokens for each in drawn])
        old = torch.tensor([each.log_probs for each in drawn], dtype=torch.float64)

        # Score them, each relative to its group.
        reward = rewards(prompts, answers)
        of_groups = reward.view(-1, GROUP)
        advantages = (of_groups - of_groups.mean(1, keepdim=True)) / (of_groups.std(1, keepdim=True) + 1e-4)
        advantages = advantages.view(-1, 1)

        # Update: the gradient of min(r A, clip(r) A) by a token's log-probability is r A, or 0 where it is clipped.
        tokens = torch.cat([prompts[:, None], answers[:, :-1]], dim=1)
        for _ in range(2):
            ratio = (model.log_probs(tokens, answers) - old).exp()
            clipped = torch.where(advantages > 0, ratio > 1 + CLIP, ratio < 1 - CLIP)
            weights = (ratio * advantages).masked_fill(clipped, 0.0)
            model.forward_backward(tokens, answers, weights=weights)
            model.clip_grad_norm(1.0)
            optimizer.step()
        history.append(reward.mean().item())
        if step % 5 == 4 and model.rank == 0:
            print(f"step {step + 1}: mean reward {history[-1]:.3f}")
    return history


if __name__ == "__main__":
    run(shardwright.Layout(dp_shard=2))  # with tp=2, pp=2 or cp=2 the loop stays as it is
