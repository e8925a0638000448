"""A trainer in plain PyTorch with the model, the tensor names and the checkpoints of torchtitan's Llama 3: FSDP2, AdamW
and torch.distributed.checkpoint. Of ours is only the order of the samples."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from shardwright.data.order import SampleOrder
from tests.training.plain_loop import (
    BETA1,
    BETA2,
    CLIP_NORM,
    EPS,
    GLOBAL_BATCH,
    LR,
    SEED,
    SEQ_LEN,
    STEPS,
    WEIGHT_DECAY,
    plain_rate,
    plain_samples,
)

LAYERS, WIDTH, HEADS, KV_HEADS, HEAD, FFN, VOCABULARY, THETA, NORM_EPS = 2, 16, 4, 2, 8, 24, 300, 100.0, 1e-3
FLAT = StateDictOptions(flatten_optimizer_state_dict=True)
RUN_FILE = f"""
steps = {STEPS}
seed = {SEED}
device = "cpu"
model = {{ n_layers = {LAYERS}, d_model = {WIDTH}, n_heads = {HEADS}, n_kv_heads = {KV_HEADS}, head_dim = {HEAD}, \
d_ffn = {FFN}, vocab_size = {VOCABULARY}, max_seq_len = {SEQ_LEN}, norm_eps = {NORM_EPS}, rope_theta = {THETA}, \
tied_embedding = false }}
batch = {{ seq_len = {SEQ_LEN}, global_batch = {GLOBAL_BATCH}, micro_batch = 2 }}
optimizer = {{ lr = {LR}, weight_decay = {WEIGHT_DECAY}, clip_norm = {CLIP_NORM}, beta1 = {BETA1}, beta2 = {BETA2}, \
eps = {EPS} }}
lr_schedule = {{ shape = "cosine", warmup_steps = 3, final_fraction = 0.1 }}
precision = {{ compute = "fp64" }}
evaluation = {{ samples = 0 }}
metrics = {{ every = 1 }}
"""


class Attention(nn.Module):
    """Attention with rotary positions as complex numbers: elements 2i and 2i + 1 are one."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv_linear = nn.Module()
        self.qkv_linear.wq = nn.Linear(WIDTH, HEADS * HEAD, bias=False)
        self.qkv_linear.wk = nn.Linear(WIDTH, KV_HEADS * HEAD, bias=False)
        self.qkv_linear.wv = nn.Linear(WIDTH, KV_HEADS * HEAD, bias=False)
        self.wo = nn.Linear(HEADS * HEAD, WIDTH, bias=False)

    def forward(self, x_BTD: Tensor) -> Tensor:
        n, t, _ = x_BTD.shape
        angles = torch.outer(torch.arange(t).double(), THETA ** (-torch.arange(0, HEAD, 2).double() / HEAD))
        turn = torch.polar(torch.ones_like(angles), angles)[:, None]

        def rotated(y: Tensor) -> Tensor:
            return torch.view_as_real(torch.view_as_complex(y.unflatten(-1, (-1, 2))) * turn).flatten(-2)

        of = self.qkv_linear
        q, k, v = (y(x_BTD).view(n, t, -1, HEAD) for y in (of.wq, of.wk, of.wv))
        heads = [y.transpose(1, 2) for y in (rotated(q), rotated(k), v)]
        mixed = F.scaled_dot_product_attention(*heads, is_causal=True, enable_gqa=True)
        return self.wo(mixed.transpose(1, 2).flatten(2))


class FeedForward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w1, self.w3 = nn.Linear(WIDTH, FFN, bias=False), nn.Linear(WIDTH, FFN, bias=False)
        self.w2 = nn.Linear(FFN, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention, self.feed_forward = Attention(), FeedForward()
        self.attention_norm, self.ffn_norm = (nn.RMSNorm(WIDTH, NORM_EPS) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + self.feed_forward(self.ffn_norm(x))


class Llama(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tok_embeddings = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleDict({str(n): Block() for n in range(LAYERS)})
        self.norm = nn.RMSNorm(WIDTH, NORM_EPS)
        self.lm_head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tok_embeddings(tokens)
        for layer in self.layers.values():
            x = layer(x)
        return self.lm_head(self.norm(x))


class Trainer:
    """FSDP2 over all ranks; over 4 ranks two replicas of two shards."""

    def __init__(self) -> None:
        torch.manual_seed(SEED)
        self.model = Llama().double()
        for parameter in self.model.parameters():
            nn.init.normal_(parameter, 0.3 + (parameter.dim() == 1), 0.3)
        ranks = dist.get_world_size()
        mesh = init_device_mesh("cpu", (ranks // 2, 2), mesh_dim_names=("replicate", "shard"))
        mesh = mesh if ranks > 2 else mesh["shard"]
        for layer in self.model.layers.values():
            fully_shard(layer, mesh=mesh)
        fully_shard(self.model, mesh=mesh)
        groups = [
            {"params": [p for p in self.model.parameters() if p.dim() == n], "weight_decay": decay}
            for n, decay in ((2, WEIGHT_DECAY), (1, 0.0))
        ]
        self.optimizer = torch.optim.AdamW(groups, lr=LR, betas=(BETA1, BETA2), eps=EPS)
        for group in self.optimizer.param_groups:
            group["initial_lr"] = LR

    def take_step(self, inputs: Tensor, targets: Tensor) -> float:
        rank, ranks = dist.get_rank(), dist.get_world_size()
        share = slice(rank * len(inputs) // ranks, (rank + 1) * len(inputs) // ranks)
        logits = self.model(inputs[share])
        loss = F.cross_entropy(logits.flatten(0, 1), targets[share].flatten(), reduction="sum")
        loss = loss / (targets != -100).sum()
        self.optimizer.zero_grad()
        (loss * ranks).backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), CLIP_NORM)
        self.optimizer.step()
        total = loss.detach()
        dist.all_reduce(total)
        return total.item()

    def state(self, step: int) -> dict[str, object]:
        """The state as torchtitan's CheckpointManager gives it to DCP."""
        return {
            **get_model_state_dict(self.model),
            "optimizer": get_optimizer_state_dict(self.model, self.optimizer, options=FLAT),
            "lr_scheduler": {"last_epoch": step},
            "train_state": {"step": step, "ntokens_seen": step * GLOBAL_BATCH * SEQ_LEN},
        }

    def load(self, folder: Path) -> int:
        state = self.state(0)
        dcp.load(state, checkpoint_id=folder)
        set_model_state_dict(self.model, {k: v for k, v in state.items() if isinstance(v, Tensor)})
        set_optimizer_state_dict(self.model, self.optimizer, state["optimizer"], options=FLAT)
        return state["train_state"]["step"]


def batches(tokens: Path) -> Iterator[tuple[Tensor, Tensor]]:
    """The batch of each step."""
    inputs, targets = plain_samples(tokens, "train")
    order = SampleOrder(SEED, len(inputs))
    for step in range(STEPS):
        ids = order(np.arange(step * GLOBAL_BATCH, (step + 1) * GLOBAL_BATCH))
        yield inputs[ids], targets[ids]


def train_ranks(tokens: Path, start: Path | None, saved: dict[int, Path]) -> dict[int, float]:
    """To be run on every rank: continue from a checkpoint, save after the steps `saved`; step -> loss."""
    torch.set_default_dtype(torch.float64)
    trainer = Trainer()
    first = 0 if start is None else trainer.load(start)
    losses = {}
    for step, batch in enumerate(batches(tokens), start=1):
        if step <= first:
            continue
        for group in trainer.optimizer.param_groups:
            group["lr"] = plain_rate(step, "cosine")
        losses[step] = trainer.take_step(*batch)
        for group in trainer.optimizer.param_groups:
            group["lr"] = plain_rate(step + 1, "cosine")
        if step in saved:
            dcp.save(trainer.state(step), checkpoint_id=saved[step])
    return losses
