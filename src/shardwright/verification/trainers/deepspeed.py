"""DeepSpeed with ZeRO 0 to 3, experts and its PipelineEngine: `shardwright verify --trainer deepspeed --matrix 2 --set
zero=2`.

Axes: dp, ep, pp. Options of `--set`: `zero`; `experts` (a layer of experts after each block, one expert for a token);
`manual=true`, which leaves gradient accumulation to the loop: `gradient_accumulation_steps` is 1, and `backward` is
called several times before `step`. `gradients()` returns the gradients before clipping. Run it with DS_ACCELERATOR=cpu
in the environment.

Shapes: B sequences, T tokens.
"""

import os
import re
from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.moe import sharded_moe
from deepspeed.moe.layer import MoE
from deepspeed.moe.utils import split_params_into_different_moe_groups_for_optimizer
from deepspeed.pipe import PipelineModule
from deepspeed.utils import safe_get_full_grad
from torch import Tensor, nn

from shardwright.hugging_face.float64 import Float64
from shardwright.model.spec import ModelSpec
from shardwright.system.errors import InputError
from shardwright.verification.trainers.adapter import StepBatch, World
from shardwright.verification.trainers.pieces import Decoder, expert_problem, load_weights, loss_sum, set_environment

sharded_moe.USE_EINSUM = False  # torch.einsum refuses the library's products of float64 and float32


class BlockWithExperts(nn.Module):
    """A block of the decoder, and a layer of experts after it."""

    def __init__(self, block: nn.Module, spec: ModelSpec, n_experts: int, ep: int) -> None:
        super().__init__()
        self.block, self.experts_norm = block, nn.RMSNorm(spec.d_model)
        expert = nn.Sequential(nn.Linear(spec.d_model, spec.d_ffn), nn.GELU(), nn.Linear(spec.d_ffn, spec.d_model))
        self.mixture = MoE(spec.d_model, expert, n_experts, ep, min_capacity=0, drop_tokens=False, use_rts=False)
        for copy in self.mixture.deepspeed_moe.experts.deepspeed_experts:
            copy[0].reset_parameters()  # the library makes equal experts
            copy[2].reset_parameters()

    def forward(self, x: Tensor) -> Tensor:
        x = self.block(x)
        output: Tensor = self.mixture(self.experts_norm(x))[0]
        return x + output


class DeepSpeedTrainer:
    """A decoder and SGD with momentum. The first step makes the engine, whose configuration needs the batch."""

    AXES: tuple[str, ...] = ("dp", "ep", "pp")

    @staticmethod
    def problem(spec: ModelSpec, axes: Mapping[str, int], options: Mapping[str, Any]) -> str | None:
        """Return why DeepSpeed cannot run these degrees, or None."""
        zero = options.get("zero", 0)
        if zero not in (0, 1, 2, 3):
            raise InputError(f"zero={zero}: valid: 0, 1, 2, 3")
        if problem := expert_problem(axes["ep"], options):
            return problem
        experts = options.get("experts", 0)
        if experts and (zero == 3 or axes["pp"] > 1):
            return "the adapter has experts with ZeRO 0, 1 and 2 and without pp"
        if axes["pp"] > 1 and (zero > 1 or options.get("manual", False)):
            return "DeepSpeed's PipelineEngine has ZeRO 0 and 1 only, and accumulates gradients itself; leave pp out"
        return None

    def __init__(self, spec: ModelSpec, world: World) -> None:
        set_environment(world)
        os.environ.setdefault("LOCAL_RANK", str(world.rank))
        deepspeed.ops.__compatible_ops__.update(deepspeed_shm_comm=False)  # gloo instead of an extension to compile
        get_accelerator().supported_dtypes = lambda: [torch.float64, torch.float32]  # the CPU's list lacks float64
        deepspeed.DeepSpeedEngine.get_data_types = lambda engine: (world.dtype,) * 2  # it takes float32 for granted
        if world.dtype == torch.float64:
            type(get_accelerator()).FloatTensor = torch.DoubleTensor  # the type of a norm
        deepspeed.init_distributed("gloo", verbose=False)
        if world.axes["pp"] > 1 and world.dtype == torch.float64:
            raise InputError(f"pp={world.axes['pp']}: DeepSpeed's pipeline sends losses in float32; --dtype float32")
        self.pp, self.data_ranks = world.axes["pp"], world.axes["dp"] * world.axes["ep"]
        self.zero, self.manual = world.options.get("zero", 0), world.options.get("manual", False)
        self.mode = Float64 if world.dtype == torch.float64 else nullcontext
        self.spec, self.n_targets = spec, 1
        self.engine: Any = None
        self.model: Any = Decoder(spec)
        self.n_local = world.options.get("experts", 0) // world.axes["ep"]
        self.first_expert = world.rank % world.axes["ep"] * self.n_local
        if self.n_local:
            with self.mode():
                for key, block in self.model.layers.items():
                    experts = self.n_local * world.axes["ep"]
                    self.model.layers[key] = BlockWithExperts(block, spec, experts, world.axes["ep"])
        if self.pp > 1:
            parts = [self.model.embedding, *self.model.layers.values(), self.model.norm, self.model.head]
            self.model = PipelineModule(parts, self.pp, loss_fn=self._loss, partition_method="uniform")
            self.data_rank = self.model._grid.get_data_parallel_id()
        else:
            self.data_rank = world.rank
        self.named = {self._global_name(name): p for name, p in self.model.named_parameters()}

    def _global_name(self, name: str) -> str:
        """Return the name in the whole model of a parameter; a PipelineModule numbers its parts, and a rank its
        experts."""
        if self.pp == 1:
            return re.sub(r"(?<=deepspeed_experts\.)\d+", lambda match: str(int(match[0]) + self.first_expert), name)
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
            self.engine.optimizer.clip_grad = limit if self.zero else 0.0  # without ZeRO the engine clips
            for group in self.engine.optimizer.param_groups:
                group["lr"] = batch.lr
            if self.pp > 1:
                return float(self.engine.train_batch(iter(batch.micro_batches)))
            total = torch.zeros(())
            for tokens_BT, targets_BT in batch.micro_batches:
                total += self._forward_backward(tokens_BT, targets_BT).detach()
            if self.manual:
                self.engine.step()
        dist.all_reduce(total)
        return total.item() / self.data_ranks / self.n_averaged

    def _forward_backward(self, tokens_BT: Tensor, targets_BT: Tensor) -> Tensor:
        """Return the loss of a micro-batch, after its backward pass; the last one also updates the parameters."""
        loss = self._loss(self.engine(tokens_BT), targets_BT)
        self.engine.backward(loss)
        if not self.manual:
            self.engine.step()
        return loss

    def _engine(self, n_sequences: int, n_micro_batches: int) -> Any:
        """Return an engine that keeps the gradients of each step before its optimizer changes them."""
        config = {
            "train_micro_batch_size_per_gpu": n_sequences,
            "gradient_accumulation_steps": n_micro_batches,
            "zero_optimization": {"stage": self.zero},
            "zero_allow_untested_optimizer": True,
            "steps_per_print": 10**9,
        }
        groups = [{"params": list(self.model.parameters()), "name": "all"}]
        if self.n_local:
            groups = split_params_into_different_moe_groups_for_optimizer(groups)
        optimizer = torch.optim.SGD(groups, momentum=0.9)
        engine = self._initialized(optimizer, config)
        update = engine._take_model_step

        def keep_and_update(*arguments: Any, **named: Any) -> Any:
            self.last = {name: safe_get_full_grad(p).clone() for name, p in self.named.items()}
            return update(*arguments, **named)

        engine._take_model_step = keep_and_update
        return engine

    def _initialized(self, optimizer: torch.optim.Optimizer, config: dict[str, Any]) -> Any:
        return deepspeed.initialize(model=self.model, optimizer=optimizer, config=config)[0]

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
