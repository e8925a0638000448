"""What `overhead.py` and `memory_savers.py` measure Shardwright against: a Llama and training loops, written by hand in
plain PyTorch.

Nothing here imports Shardwright. It is what one writes to have as little as possible between the model and the
hardware: no metrics, no checkpoints, no clipping, tokens made up on the spot.
"""

import os
import time
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from shardwright.system.torch_private import flash_attention_cpu

LAYERS, WIDTH, FFN, HEADS, KV_HEADS, VOCAB, SEQ = 4, 256, 704, 8, 4, 2048, 256
HEAD_DIM = WIDTH // HEADS
MICRO_BATCH, STEP_TOKENS = 4, 4096
# Two experts of half the width do for a token what the one network does.
EXPERTS, TOP_K, EXPERT_FFN = 8, 2, FFN // 2


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q = nn.Linear(WIDTH, HEADS * HEAD_DIM, bias=False)
        self.k = nn.Linear(WIDTH, KV_HEADS * HEAD_DIM, bias=False)
        self.v = nn.Linear(WIDTH, KV_HEADS * HEAD_DIM, bias=False)
        self.o = nn.Linear(HEADS * HEAD_DIM, WIDTH, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        batch, length, _ = x.shape
        q = self.q(x).view(batch, length, HEADS, HEAD_DIM).transpose(1, 2)
        k = self.k(x).view(batch, length, KV_HEADS, HEAD_DIM).transpose(1, 2)
        v = self.v(x).view(batch, length, KV_HEADS, HEAD_DIM).transpose(1, 2)
        out = F.scaled_dot_product_attention(
            rotate(q, cos, sin), rotate(k, cos, sin), v, is_causal=True, enable_gqa=True
        )
        return self.o(out.transpose(1, 2).reshape(batch, length, -1))


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    left, right = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-right, left), dim=-1) * sin


class Network(nn.Module):
    def __init__(self, inner: int = FFN) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, inner, bias=False)
        self.up = nn.Linear(WIDTH, inner, bias=False)
        self.down = nn.Linear(inner, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Mixture(nn.Module):
    """Sigmoid scores, weights that sum to 1, and a loop over the experts, each on the tokens that picked it."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, EXPERTS, bias=False)
        self.experts = nn.ModuleList(Network(EXPERT_FFN) for _ in range(EXPERTS))

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(0, 1)
        scores, picked = self.router(tokens).sigmoid().topk(TOP_K)
        weights = scores / scores.sum(1, keepdim=True)
        out = torch.zeros_like(tokens)
        for number, expert in enumerate(self.experts):
            rows, choices = (picked == number).nonzero(as_tuple=True)
            chosen = expert(tokens.index_select(0, rows)) * weights[rows, choices].unsqueeze(1)
            out.index_add_(0, rows, chosen)
        return out.view_as(x)


class Block(nn.Module):
    def __init__(self, network: type[nn.Module]) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(WIDTH, eps=1e-5)
        self.attention = Attention()
        self.ffn_norm = nn.RMSNorm(WIDTH, eps=1e-5)
        self.ffn = network()

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x), cos, sin)
        return x + self.ffn(self.ffn_norm(x))


class Llama(nn.Module):
    def __init__(self, network: type[nn.Module] = Network) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, WIDTH)
        self.layers = nn.ModuleList(Block(network) for _ in range(LAYERS))
        self.norm = nn.RMSNorm(WIDTH, eps=1e-5)
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)
        angles = torch.outer(torch.arange(SEQ), 10_000.0 ** (-torch.arange(0, HEAD_DIM, 2) / HEAD_DIM)).repeat(1, 2)
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)

    def features(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x, self.cos, self.sin)
        return self.norm(x)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.features(tokens))


KEPT = {torch.ops.aten.mm.default, flash_attention_cpu.default}


def keeps_products(context: object, op: object, *_: object, **__: object) -> CheckpointPolicy:
    """Outputs of matmuls and of attention are saved, all else is computed again."""
    return CheckpointPolicy.MUST_SAVE if op in KEPT else CheckpointPolicy.PREFER_RECOMPUTE


def recompute(model: nn.Module, saver: str) -> None:
    """Recompute each block, wholly or all but matmuls and attention."""
    contexts = {"context_fn": partial(create_selective_checkpoint_contexts, keeps_products)}
    for layer in model.layers:
        again = partial(checkpoint, layer.forward, use_reentrant=False)
        layer.forward = partial(again, **contexts) if saver == "recompute selective" else again


def shard(model: nn.Module, saver: str) -> None:
    """FSDP2 as it comes: ZeRO-3, gradients reduced and sharded after every microbatch."""
    options = {}
    if saver == "zero 3, parameters and states cpu":
        options["offload_policy"] = CPUOffloadPolicy(pin_memory=False)
    if saver == "zero 3, gradients bf16":
        options["mp_policy"] = MixedPrecisionPolicy(reduce_dtype=torch.bfloat16)
    for layer in model.layers:
        fully_shard(layer, **options)
    fully_shard(model, **options)


def optimizers(model: nn.Module, saver: str) -> list[torch.optim.Optimizer]:
    parameters = list(model.parameters())
    if saver == "adafactor":
        return [torch.optim.Adafactor(parameters, lr=1e-2, weight_decay=0.01)]
    if saver == "adamw-8bit":
        from torchao.optim import AdamW8bit

        return [AdamW8bit(parameters, lr=1e-3, weight_decay=0.01)]
    if saver == "muon":
        hidden = [p for p in model.layers.parameters() if p.ndim == 2]
        rest = [p for p in parameters if not any(p is each for each in hidden)]
        return [torch.optim.Muon(hidden, lr=1e-3, weight_decay=0.01), torch.optim.AdamW(rest, lr=1e-3, fused=True)]
    return [torch.optim.AdamW(parameters, lr=1e-3, weight_decay=0.01, fused=True)]


def loss_of(model: nn.Module, tokens: Tensor, targets: Tensor, saver: str) -> Tensor:
    if not saver.startswith("loss_chunk_tokens"):
        return F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())

    def loss_sum(x: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(model.head(x), target, reduction="sum")

    chunk = int(saver.split()[1])
    pairs = zip(model.features(tokens).flatten(0, 1).split(chunk), targets.flatten().split(chunk), strict=True)
    return sum(checkpoint(loss_sum, x, target, use_reentrant=False) for x, target in pairs) / targets.numel()


def train(
    kind: str,
    steps: int,
    warmup: int,
    saver: str = "none",
    micro_batch: int = MICRO_BATCH,
    warm: Callable[[], None] = lambda: None,
) -> list[tuple[float, float]]:
    """(wall seconds, CPU seconds of this process) of each step after the warm-up, at whose end `warm` is called. kind:
    single, moe, ddp, fsdp; saver: a row of `memory_savers.py`, of which those with zero 3 are fsdp."""
    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model: nn.Module = Llama(Mixture if kind == "moe" else Network)
    if world > 1:
        dist.init_process_group("gloo")
    if kind == "ddp":
        model = DistributedDataParallel(model, gradient_as_bucket_view=True)
    if saver.startswith("recompute"):
        recompute(model, saver)
    if kind == "fsdp" or saver.startswith("zero 3"):
        shard(model, saver)
    steppers = optimizers(model, saver)
    micro_batch = min(micro_batch, STEP_TOKENS // (SEQ * world))
    accumulation = STEP_TOKENS // (SEQ * micro_batch * world)
    saved = partial(save_on_cpu, pin_memory=False) if saver == "offload_activations cpu" else nullcontext
    typed = torch.autocast("cpu", torch.bfloat16, enabled=saver == "compute bf16")
    generator = torch.Generator().manual_seed(rank)
    times = []
    for step in range(warmup + steps):
        if step == warmup:
            warm()
        wall, cpu = time.perf_counter(), time.process_time()
        for microbatch in range(accumulation):
            last = microbatch == accumulation - 1
            data = torch.randint(VOCAB, (micro_batch, SEQ + 1), generator=generator)
            if kind == "ddp":
                model.require_backward_grad_sync = last
            with saved(), typed:
                loss = loss_of(model, data[:, :-1], data[:, 1:], saver) / accumulation
            loss.backward()
        for optimizer in steppers:
            optimizer.step()
            optimizer.zero_grad()
        if step >= warmup:
            times.append((time.perf_counter() - wall, time.process_time() - cpu))
    if world > 1:
        del model, steppers, optimizer, loss
        dist.barrier()
        dist.destroy_process_group()
    return times
