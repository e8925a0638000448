"""SmolLM2-1.7B trained by a loop in plain PyTorch, as torchtitan has it: what the speed of ours stands next to.

    python benchmarks/gpu/torch_loop.py [--compile] [--steps 14]

FSDP2 with each block its own group, bf16 with fp32 masters and reductions, each block and the loss compiled, fused
AdamW, gradients clipped. Nothing here imports Shardwright. Tokens are random; metrics and checkpoints are left out.

Shapes: B batch, T tokens, D model, H heads, C width of a head, V vocabulary.
"""

import argparse
import json
import os
import statistics
import time
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

LAYERS, WIDTH, FFN, HEADS, VOCAB = 24, 2048, 8192, 32, 49152
HEAD_DIM, THETA, EPS = WIDTH // HEADS, 130000.0, 1e-5


class Block(nn.Module):
    """Causal attention and a SwiGLU network, each after an RMSNorm."""

    def __init__(self) -> None:
        super().__init__()
        self.attention_norm, self.ffn_norm = nn.RMSNorm(WIDTH, eps=EPS), nn.RMSNorm(WIDTH, eps=EPS)
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))
        self.gate, self.up = (nn.Linear(WIDTH, FFN, bias=False) for _ in range(2))
        self.down = nn.Linear(FFN, WIDTH, bias=False)

    def forward(self, x_BTD: Tensor, cos_TC: Tensor, sin_TC: Tensor) -> Tensor:
        """(B, T, D) -> (B, T, D)."""
        normed_BTD = self.attention_norm(x_BTD)
        q, k, v = (each(normed_BTD).unflatten(-1, (HEADS, -1)).transpose(1, 2) for each in (self.q, self.k, self.v))
        q, k = rotate(q, cos_TC, sin_TC), rotate(k, cos_TC, sin_TC)
        o_BHTC = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x_BTD = x_BTD + self.o(o_BHTC.transpose(1, 2).flatten(-2))
        normed_BTD = self.ffn_norm(x_BTD)
        return x_BTD + self.down(F.silu(self.gate(normed_BTD)) * self.up(normed_BTD))


def rotate(x_BHTC: Tensor, cos_TC: Tensor, sin_TC: Tensor) -> Tensor:
    """Rotary embedding with halves of a head as pairs."""
    left, right = x_BHTC.chunk(2, dim=-1)
    return x_BHTC * cos_TC + torch.cat((-right, left), dim=-1) * sin_TC


class Model(nn.Module):
    """The decoder; the head has the matrix of the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, WIDTH)
        self.layers = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm = nn.RMSNorm(WIDTH, eps=EPS)
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens_BT: Tensor, cos_TC: Tensor, sin_TC: Tensor) -> Tensor:
        """(B, T) -> logits (B, T, V)."""
        x_BTD = self.embedding(tokens_BT)
        for layer in self.layers:
            x_BTD = layer(x_BTD, cos_TC, sin_TC)
        return self.head(self.norm(x_BTD))


def cross_entropy(logits_BTV: Tensor, targets_BT: Tensor) -> Tensor:
    """The mean loss, in fp32."""
    return F.cross_entropy(logits_BTV.flatten(0, 1).float(), targets_BT.flatten())


def build(compiled: bool, device: torch.device) -> Model:
    """The model with FSDP2 on one rank."""
    with torch.device("meta"):
        model = Model()
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for layer in model.layers:
        if compiled:
            layer.compile()
        fully_shard(layer, mp_policy=policy)
    fully_shard(model, mp_policy=policy, reshard_after_forward=False)
    model.to_empty(device=device)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.02) if parameter.ndim > 1 else nn.init.ones_(parameter)
    return model


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Tokens per second, the median of the steps after the warm-up, and the peaks of the allocator."""
    device = torch.device("cuda", 0)
    torch.manual_seed(0)
    model = build(options.compile, device)
    loss_of = torch.compile(cross_entropy) if options.compile else cross_entropy
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    angles_TC = torch.outer(
        torch.arange(options.seq_len, device=device).float(),
        THETA ** (-torch.arange(0, HEAD_DIM, 2, device=device).float() / HEAD_DIM),
    ).repeat(1, 2)
    cos_TC, sin_TC = angles_TC.cos().bfloat16(), angles_TC.sin().bfloat16()
    tokens = torch.randint(0, VOCAB, (options.micro_batch, options.seq_len + 1), device=device)
    inputs_BT, targets_BT = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
    seconds = []
    for _ in range(options.steps):
        torch.cuda.synchronize()
        began = time.perf_counter()
        loss_of(model(inputs_BT, cos_TC, sin_TC), targets_BT).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - began)
    return {
        "tokens_per_s": inputs_BT.numel() / statistics.median(seconds[len(seconds) // 2 :]),
        "allocated_bytes": torch.cuda.max_memory_allocated(),
        "reserved_bytes": torch.cuda.max_memory_reserved(),
        "retries": torch.cuda.memory_stats()["num_alloc_retries"],
    }


def main() -> None:
    """Measure and print a line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--steps", type=int, default=14)
    parser.add_argument("--micro-batch", type=int, default=4)
    parser.add_argument("--seq-len", type=int, default=4096)
    options = parser.parse_args()
    torch.cuda.set_device(0)
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
    print(json.dumps(measure(options)), flush=True)
    os._exit(0)  # objects of FSDP2 that live on may abort the process at its end


if __name__ == "__main__":
    main()
