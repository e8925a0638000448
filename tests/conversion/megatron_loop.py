"""A trainer with the library megatron-core; tests/conversion/test_megatron.py starts it on CPU ranks with gloo.

It needs torch, megatron-core, numpy, einops and psutil, and a copy of this package's file `megatron_cpu.py` in the
folder that is its argument and in PYTHONPATH. `job.json` in that folder: config (TransformerConfig), model (GPTModel),
tp, pp, sharding (of the distributed optimizer's states, or null for the plain optimizer), start (the folder of a step,
or null), save (step -> folder), rates (of each step, and one more), and AdamW's settings. `batches.pt`: for each step
the inputs and the targets of all ranks.
"""

import json
import sys
import warnings
from argparse import Namespace
from functools import partial
from pathlib import Path
from typing import Any

import psutil  # noqa: F401  # without it the library waits for a writer of checkpoints that has ended
import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.distributed import finalize_model_grads as finalize
from megatron.core.enums import ModelType
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer import TransformerConfig
from megatron_cpu import run_without_cuda
from torch import Tensor

MICRO_BATCH = 1
warnings.simplefilter("ignore")


class Trainer:
    """The model, its optimizer and the number of steps taken."""

    def __init__(self, job: dict[str, Any]) -> None:
        self.job, self.step = job, 0
        parallel_state.initialize_model_parallel(
            job["tp"], job["pp"], job.get("vpp"), expert_model_parallel_size=job.get("ep", 1)
        )
        config = TransformerConfig(
            **job["config"],
            normalization="RMSNorm",
            gated_linear_unit=True,
            activation_func=torch.nn.functional.silu,
            add_bias_linear=False,
            hidden_dropout=0.0,
            attention_dropout=0.0,
            tensor_model_parallel_size=job["tp"],
            pipeline_model_parallel_size=job["pp"],
            virtual_pipeline_model_parallel_size=job.get("vpp"),
            expert_model_parallel_size=job.get("ep", 1),
            pipeline_dtype=torch.float32,
            params_dtype=torch.float32,
            use_cpu_initialization=True,
            gradient_accumulation_fusion=False,
            finalize_model_grads_func=finalize,
            deallocate_pipeline_outputs=False,
            bias_activation_fusion=False,
        )
        layer = get_gpt_layer_local_spec(
            num_experts=config.num_moe_experts,
            moe_grouped_gemm=config.moe_grouped_gemm,
            qk_layernorm=config.qk_layernorm,
            normalization="RMSNorm",
        )
        if config.num_moe_experts:  # the name of this norm in the specs of layers with Transformer Engine
            layer.submodules.sharded_state_dict_keys_map.pop("pre_mlp_layernorm.", None)
        self.chunks = []
        n_chunks = job.get("vpp") or 1
        for chunk in range(n_chunks):
            chunk_of = {"vp_stage": chunk} if job.get("vpp") else {}
            gpt = GPTModel(
                config,
                layer,
                **job["model"],
                position_embedding_type="rope",
                parallel_output=True,
                pre_process=parallel_state.is_pipeline_first_stage(ignore_virtual=False, **chunk_of),
                post_process=parallel_state.is_pipeline_last_stage(ignore_virtual=False, **chunk_of),
                **chunk_of,
            )
            for number, (_, parameter) in enumerate(sorted(gpt.named_parameters())):
                torch.manual_seed(
                    number if parameter.dim() == 1 else 1000 * (dist.get_rank() + 1) + 100 * chunk + number
                )
                torch.nn.init.normal_(parameter, 0.3 + (parameter.dim() == 1), 0.3)
            ddp = DistributedDataParallelConfig(use_distributed_optimizer=job["sharding"] is not None)
            self.chunks.append(DistributedDataParallel(config, ddp, gpt))
        for chunk in self.chunks:
            chunk.broadcast_params()
        adamw = OptimizerConfig(
            lr=job["rates"][0],
            weight_decay=job["weight_decay"],
            adam_beta1=job["betas"][0],
            adam_beta2=job["betas"][1],
            adam_eps=job["eps"],
            clip_grad=job["clip_norm"],
            params_dtype=torch.float32,
            use_distributed_optimizer=job["sharding"] is not None,
        )
        self.optimizer = get_megatron_optimizer(adamw, self.chunks)
        self.schedule = OptimizerParamScheduler(
            self.optimizer, 0.0, job["rates"][0], 0.0, 0, 1000, "constant", job["weight_decay"], job["weight_decay"],
            0, "constant", use_checkpoint_opt_param_scheduler=False, override_opt_param_scheduler=True,
        )  # fmt: skip

    def take_step(self, inputs: Tensor, targets: Tensor) -> float:
        """Train on this rank's part of a batch and return the loss of the whole batch, before the step."""
        rank, ranks = parallel_state.get_data_parallel_rank(), parallel_state.get_data_parallel_world_size()
        share = slice(rank * len(inputs) // ranks, (rank + 1) * len(inputs) // ranks)
        parts = [*zip(inputs[share].split(MICRO_BATCH), targets[share].split(MICRO_BATCH), strict=True)]
        n_targets, sums = (targets != -100).sum(), []

        def loss_of(mask: Tensor, losses: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
            loss = (losses * mask).sum() / n_targets
            sums.append(loss.detach())
            return loss * len(parts) * ranks, {}

        def forward(samples: Any, model: Any) -> tuple[Tensor, Any]:
            ids, labels = next(samples)
            positions = torch.arange(ids.shape[1]).expand_as(ids)
            mask = labels != -100
            causal = torch.ones(ids.shape[1], ids.shape[1], dtype=torch.bool).triu(1)[None, None]
            return model(ids, positions, causal, labels=labels.clamp(min=0)), partial(loss_of, mask)

        for chunk in self.chunks:
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()
        get_forward_backward_func()(
            forward_step_func=forward,
            data_iterator=[iter(parts) for _ in self.chunks] if len(self.chunks) > 1 else iter(parts),
            model=self.chunks if len(self.chunks) > 1 else self.chunks[0],
            num_microbatches=len(parts),
            seq_length=inputs.shape[1],
            micro_batch_size=MICRO_BATCH,
            forward_only=False,
        )
        self.optimizer.step()
        self.step += 1
        total = torch.stack(sums).sum() if sums else torch.zeros(())
        dist.all_reduce(total)
        return total.item() / self.job["tp"]

    def set_rate(self, rate: float) -> None:
        """Set the settings of the next update as Megatron-LM's scheduler does."""
        for group in self.optimizer.param_groups:
            group["lr"] = rate * group["lr_mult"]
            group["weight_decay"] = self.job["weight_decay"] * group["wd_mult"]

    def state(self, loading: bool) -> dict[str, Any]:
        """The state with the keys of Megatron-LM's `training/checkpointing.py`."""
        sharding = {"distrib_optim_sharding_type": self.job["sharding"]} if self.job["sharding"] else {}
        metadata = {**sharding, "chained_optim_avoid_prefix": True} | self.job.get("metadata", {})
        keys = ["model"] if len(self.chunks) == 1 else [f"model{number}" for number in range(len(self.chunks))]
        state: dict[str, Any] = {
            key: chunk.module.sharded_state_dict(metadata=metadata)
            for key, chunk in zip(keys, self.chunks, strict=True)
        }
        state["optimizer"] = self.optimizer.sharded_state_dict(dict(state), is_loading=loading, metadata=metadata)
        if not loading:
            sizes = self.job["config"] | self.job["model"] | {"norm_epsilon": self.job["config"]["layernorm_epsilon"]}
            samples = {"consumed_train_samples": self.step * self.job["samples"], "seq_length": self.job["length"]}
            kinds = {"model_type": ModelType.encoder_or_decoder, "params_dtype": torch.float32, "save": Path("runs")}
            state |= {
                "args": Namespace(**sizes, **samples, **kinds, rotary_percent=1.0, swiglu=True),
                "checkpoint_version": 3.0,
                "iteration": self.step,
                "opt_param_scheduler": self.schedule.state_dict(),
                "content_metadata": metadata,
            }
        return state

    def save(self, folder: Path) -> None:
        if dist.get_rank() == 0:
            folder.mkdir(parents=True)
        dist.barrier()
        self.schedule.num_steps = self.step * self.job["samples"]
        dist_checkpointing.save(self.state(False), folder)
        if dist.get_rank() == 0:
            (folder.parent / "latest_checkpointed_iteration.txt").write_text(str(self.step))

    def load(self, folder: Path) -> None:
        self.set_rate(0.0)
        self.optimizer.step()  # without Transformer Engine the library only loads states into existing ones
        loaded = dist_checkpointing.load(self.state(True), folder, strict="assume_ok_unexpected")
        for chunk, key in zip(self.chunks, [key for key in loaded if key.startswith("model")], strict=True):
            chunk.module.load_state_dict(loaded[key])
        self.optimizer.load_state_dict(loaded["optimizer"])
        for optimizer in self.optimizer.chained_optimizers:
            for state in optimizer.optimizer.state.values():  # the library gives all parameters one counter
                state["step"] = state["step"].clone()
        self.schedule.load_state_dict(loaded["opt_param_scheduler"])
        self.step = loaded["iteration"]
        assert self.schedule.num_steps == loaded["args"].consumed_train_samples == self.step * self.job["samples"]


def main(folder: Path) -> None:
    job = json.loads((folder / "job.json").read_text())
    run_without_cuda()
    dist.init_process_group("gloo")
    trainer = Trainer(job)
    if job["start"]:
        trainer.load(Path(job["start"]))
    losses = {}
    for step, batch in enumerate(torch.load(folder / "batches.pt"), start=1):
        if step <= trainer.step:
            continue
        trainer.set_rate(job["rates"][step - 1])
        losses[step] = trainer.take_step(*batch)
        trainer.set_rate(job["rates"][step])
        if str(step) in job["save"]:
            trainer.save(Path(job["save"][str(step)]))
    if dist.get_rank() == 0:
        (folder / "losses.json").write_text(json.dumps(losses))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
