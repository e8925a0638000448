"""The Trainer of Hugging Face transformers: `shardwright verify --trainer transformers --matrix 2`.

A LlamaForCausalLM with DDP, gradient accumulation and clipping by the Trainer, which runs `max_steps=1` for each step.
`gradients()` returns the gradients after clipping. The loss is the mean over ranks, as the Trainer logs it.
`--set average_tokens_across_devices=false` passes this option on. `--set own_loss=true` takes a model that computes its
loss itself and whose `forward` takes no `num_items_in_batch`: the Trainer has to average it over micro-batches.

Shapes: B sequences, T tokens.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
import transformers
from torch import Tensor
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM, PrinterCallback, TrainingArguments

from shardwright.data.samples import IGNORE
from shardwright.hugging_face.float64 import Float64
from shardwright.model.spec import ModelSpec
from shardwright.system.errors import InputError
from shardwright.verification.trainers.adapter import StepBatch, World
from shardwright.verification.trainers.pieces import load_weights, loss_sum, set_environment

OPTIONS = ("average_tokens_across_devices",)
"""Arguments of the Trainer that `--set` may name."""


class _OneStep(transformers.Trainer):
    """A Trainer that takes micro-batches as they are, since each rank has received its own."""

    def get_train_dataloader(self) -> DataLoader[Any]:
        rows: Any = self.train_dataset
        return DataLoader(rows, batch_size=None)


class LlamaWithOwnLoss(LlamaForCausalLM):
    """A Llama whose mean loss over micro-batches and ranks is the loss of the batch, if `factor` is micro-batches x
    ranks / counted targets of the batch."""

    factor = 1.0

    def forward(self, input_ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        logits_BTV = super().forward(input_ids=input_ids).logits
        return {"loss": loss_sum(logits_BTV[:, :-1], labels[:, 1:]) * self.factor}


class TransformersTrainer:
    """A LlamaForCausalLM, and SGD with momentum that the Trainer is given."""

    def __init__(self, spec: ModelSpec, world: World) -> None:
        set_environment(world)
        transformers.logging.set_verbosity_error()
        config = LlamaConfig(
            vocab_size=spec.vocab_size,
            hidden_size=spec.d_model,
            intermediate_size=spec.d_ffn,
            num_hidden_layers=spec.n_layers,
            num_attention_heads=spec.n_heads,
            num_key_value_heads=spec.n_kv_heads,
            max_position_embeddings=spec.max_seq_len + 1,
        )
        self.n_ranks, self.wide = world.size, world.dtype == torch.float64
        self.options = _options(world)
        model: Any = (LlamaWithOwnLoss if world.options.get("own_loss", False) else LlamaForCausalLM)(config)
        self.model: Any = model.to(dtype=world.dtype)
        self.optimizer = torch.optim.SGD(self.model.parameters(), momentum=0.9)
        self.optimizer.register_step_pre_hook(self._keep_gradients)

    def _keep_gradients(self, *_: Any) -> None:
        self.last = {name: None if p.grad is None else p.grad.clone() for name, p in self.parameters().items()}

    def load(self, weights: Mapping[str, Tensor]) -> None:
        load_weights(self.parameters(), weights)

    def step(self, batch: StepBatch) -> float:
        self.optimizer.param_groups[0].update(lr=batch.lr, initial_lr=batch.lr)
        arguments = TrainingArguments(
            output_dir="none",
            use_cpu=True,
            max_steps=1,
            per_device_train_batch_size=len(batch.micro_batches[0][0]),
            gradient_accumulation_steps=len(batch.micro_batches),
            max_grad_norm=batch.clip_norm,
            lr_scheduler_type="constant",
            logging_strategy="no",
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
            ddp_find_unused_parameters=False,
            **self.options,
        )
        self.model.factor = len(batch.micro_batches) * self.n_ranks / batch.n_targets
        rows = [_with_labels(*micro_batch) for micro_batch in batch.micro_batches]
        trainer = _OneStep(self.model, arguments, train_dataset=rows, optimizers=(self.optimizer, None))
        trainer.remove_callback(PrinterCallback)
        with Float64() if self.wide else torch.enable_grad():
            loss = torch.tensor(trainer.train().training_loss)
        dist.all_reduce(loss)
        return loss.item() / self.n_ranks

    def gradients(self) -> dict[str, Any]:
        return self.last

    def parameters(self) -> dict[str, Any]:
        return dict(self.model.named_parameters())


def _options(world: World) -> dict[str, Any]:
    """Return the arguments of the Trainer that `--set` names. Raises InputError if this release has not one of them."""
    options = {name: world.options[name] for name in OPTIONS if name in world.options}
    known = {field.name for field in dataclasses.fields(TrainingArguments)}
    if missing := [name for name in options if name not in known]:
        raise InputError(f"{missing[0]}: transformers {transformers.__version__} has no such argument; leave it out")
    return options


def _with_labels(tokens_BT: Tensor, targets_BT: Tensor) -> dict[str, Tensor]:
    """Return a batch of transformers, where position t is trained on label t + 1. A token is added to each sequence,
    which no counted position attends to."""
    return {
        "input_ids": torch.cat([tokens_BT, tokens_BT[:, :1]], 1),
        "labels": torch.cat([torch.full_like(targets_BT[:, :1], IGNORE), targets_BT], 1),
    }


Trainer = TransformersTrainer
