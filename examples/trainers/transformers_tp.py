"""Tensor parallelism of Hugging Face transformers with a Qwen3, for `shardwright verify --trainer
examples/trainers/transformers_tp.py --dtype float32`. The library computes norms in float32."""

import os
import tempfile
import warnings

import torch
from safetensors.torch import save_file
from torch.distributed.tensor import DTensor, distribute_tensor
from transformers import Qwen3Config, Qwen3ForCausalLM

from shardwright.testing import loss_sum

warnings.filterwarnings("ignore", message="Passing `tp_plan` directly")


class Trainer:
    AXES = ("tp",)

    def __init__(self, spec, world):
        self.data_rank, self.data_ranks = 0, 1  # every rank has the same sequences
        config = Qwen3Config(
            vocab_size=spec.vocab_size,
            hidden_size=spec.d_model,
            intermediate_size=spec.d_ffn,
            num_hidden_layers=spec.n_layers,
            num_attention_heads=spec.n_heads,
            num_key_value_heads=spec.n_kv_heads,
            head_dim=spec.d_model // spec.n_heads,
            max_position_embeddings=spec.max_seq_len,
            tie_word_embeddings=False,
        )
        self.model = Qwen3ForCausalLM(config)
        if world.size > 1:
            os.environ.update(RANK=str(world.rank), LOCAL_RANK=str(world.rank), WORLD_SIZE=str(world.size))
            with tempfile.TemporaryDirectory() as folder:
                config.save_pretrained(folder)
                save_file(self.model.state_dict(), f"{folder}/model.safetensors", {"format": "pt"})
                self.model = Qwen3ForCausalLM.from_pretrained(folder, tp_plan="auto", dtype=world.dtype)
        self.model.train()
        self.optimizer = torch.optim.SGD(self.model.parameters())

    def load(self, weights):
        for name, p in self.model.named_parameters():
            p.data.copy_(
                distribute_tensor(weights[name], p.device_mesh, p.placements)
                if isinstance(p, DTensor)
                else weights[name]
            )

    def step(self, batch):
        self.optimizer.zero_grad()
        total = 0.0
        for tokens, targets in batch.micro_batches:
            loss = loss_sum(self.model(input_ids=tokens).logits, targets) / batch.n_targets
            loss.backward()
            total += loss.item()
        whole = [p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad for p in self.model.parameters()]
        norm = torch.nn.utils.get_total_norm(whole)
        for p in self.model.parameters():
            p.grad.mul_(min(1.0, batch.clip_norm / (norm.item() + 1e-6)))
        self.optimizer.param_groups[0]["lr"] = batch.lr
        self.optimizer.step()
        return total

    def gradients(self):
        return {name: p.grad for name, p in self.model.named_parameters()}

    def parameters(self):
        return dict(self.model.named_parameters())
