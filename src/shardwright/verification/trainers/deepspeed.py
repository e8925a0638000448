"""DeepSpeed with ZeRO 0 to 3 and its PipelineEngine: `shardwright verify --trainer deepspeed --matrix 2 --set zero=2`.

Axes: dp, pp. `--set manual=true` leaves gradient accumulation to the loop: `gradient_accumulation_steps` is 1, and
`backward` is called several times before `step`. `gradients()` returns the gradients before clipping. Run it with
DS_ACCELERATOR=cpu in the environment.

Shapes: B sequences, T tokens.
"""

import os
from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.pipe import PipelineModule
from deepspeed.utils import safe_get_full_grad
from torch import Tensor

from shardwright.hugging_face.float64 import Float64
from shardwright.model.spec import ModelSpec
from shardwright.system.errors import InputError
from shardwright.verification.trainers.adapter import StepBatch, World
from shardwright.verification.trainers.decoder import Decoder, loss_sum
from shardwright.verification.trainers.pieces import load_weights, set_environment


class DeepSpeedTrainer:
    """A decoder and SGD with momentum. The first step makes the engine, whose configuration needs the batch."""

    AXES = ("dp", "pp")

    @staticmethod
    def problem(spec: ModelSpec, axes: Mapping[str, int], options: Mapping[str, Any]) -> str | None:
        """Return why DeepSpeed cannot run these degrees, or None."""
        zero = options.get("zero", 0)
        if zero not in (0, 1, 2, 3):
            raise InputError(f"zero={zero}: valid: 0, 1, 2, 3")
        if axes["pp"] > 1 and (zero > 1 or options.get("manual", False)):
            return "DeepSpeed's PipelineEngine has ZeRO 0 and 1 only, and accumulates gradients itself; leave pp out"
        return None

    def __init__(self, spec: ModelSpec, world: World) -> None:
        set_environment(world)
        os.environ.setdefault("LOCAL_RANK", str(world.rank))
        deepspeed.ops.__compatible_ops__.update(deepspeed_shm_comm=False)  # gloo instead of an extension to compile
        get_accelerator().supported_dtypes = lambda: [torch.float64, torch.float32]  # the CPU's list lacks float64
        deepspeed.DeepSpeedEngine.get_data_types = lambda engine: (world.dtype,) * 2  # it takes float32 for granted
        deepspeed.init_distributed("gloo", verbose=False)
        if world.axes["pp"] > 1 and world.dtype == torch.float64:
            raise InputError(f"pp={world.axes['pp']}: DeepSpeed's pipeline sends losses in float32; --dtype float32")
        self.pp, self.data_ranks = world.axes["pp"], world.axes["dp"]
        self.zero, self.manual = world.options.get("zero", 0), world.options.get("manual", False)
        self.mode = Float64 if world.dtype == torch.float64 else nullcontext
        self.spec, self.n_targets = spec, 1
        self.engine: Any = None
        self.model: Any = Decoder(spec)
        if self.pp > 1:
            parts = [self.model.embedding, *self.model.layers.values(), self.model.norm, self.model.head]
            self.model = PipelineModule(parts, self.pp, loss_fn=self._loss, partition_method="uniform")
            self.data_rank = self.model._grid.get_data_parallel_id()
        else:
            self.data_rank = world.rank
        self.named = {self._global_name(name): p for name, p in self.model.named_parameters()}

    def _global_name(self, name: str) -> str:
        """Return the name in the whole model of a parameter; a PipelineModule numbers its parts."""
        if self.pp == 1:
            return name
        number, _, rest = name.partition(".")
        n = self.spec.n_layers
        parts = ["embedding", *(f"layers.{layer}" for layer in range(n)), "norm", "head"]
        return f"{parts[int(number)]}.{rest}"

    def _loss(self, logits_BTV: Tensor, targets_BT: Tensor) -> Tensor:
        """Return the loss of a micro-batch. DeepSpeed averages over data ranks, and over micro-batches if it knows
        their number."""
        return loss_sum(logits_BTV, targets_BT) * self.data_ranks * self.n_averaged / self.n_targets

    def load(self, weights: Mapping[str, Tensor]) -> None:
        load_weights(self.named, weights)

    def step(self, batch: StepBatch) -> float | None:
        self.n_targets, n_micro_batches = batch.n_targets, len(batch.micro_batches)
        self.n_averaged = 1 if self.manual else n_micro_batches
        limit = batch.clip_norm if batch.clip_norm < float("inf") else 0.0
        with self.mode():
            if self.engine is None:
                self.engine = self._engine(len(batch.micro_batches[0][0]), self.n_averaged)
            self.engine._config.gradient_clipping = limit
            self.engine.optimizer.clip_grad = limit
            for group in self.engine.optimizer.param_groups:
                group["lr"] = batch.lr
            if self.pp > 1:
                return float(self.engine.train_batch(iter(batch.micro_batches)))
            total = torch.zeros(())
            for tokens_BT, targets_BT in batch.micro_batches:
                loss = self._loss(self.engine(tokens_BT), targets_BT)
                self.engine.backward(loss)
                if not self.manual:
                    self.engine.step()
                total += loss.detach()
            if self.manual:
                self.engine.step()
        dist.all_reduce(total)
        return total.item() / self.data_ranks / self.n_averaged

    def _engine(self, n_sequences: int, n_micro_batches: int) -> Any:
        """Return an engine that keeps the gradients of each step before its optimizer changes them."""
        config = {
            "train_micro_batch_size_per_gpu": n_sequences,
            "gradient_accumulation_steps": n_micro_batches,
            "zero_optimization": {"stage": self.zero},
            "zero_allow_untested_optimizer": True,
            "steps_per_print": 10**9,
        }
        optimizer = torch.optim.SGD(self.model.parameters(), momentum=0.9)
        engine, *_ = deepspeed.initialize(model=self.model, optimizer=optimizer, config=config)
        update = engine._take_model_step

        def keep_and_update(*arguments: Any, **named: Any) -> Any:
            self.last = {name: safe_get_full_grad(p).clone() for name, p in self.named.items()}
            return update(*arguments, **named)

        engine._take_model_step = keep_and_update
        return engine

    def gradients(self) -> dict[str, Any]:
        return self.last

    def parameters(self) -> dict[str, Any]:
        return dict(self._wholes())

    def _wholes(self) -> Iterator[tuple[str, Tensor]]:
        for name, p in self.named.items():
            if self.zero == 3 and self.engine is not None:
                with deepspeed.zero.GatheredParameters([p]):
                    yield name, p.detach().clone()
            else:
                yield name, p.detach()


Trainer = DeepSpeedTrainer
