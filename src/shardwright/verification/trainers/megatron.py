"""Megatron Core with its DDP, tensor and sequence parallelism, pipelines and experts, on CPUs: `shardwright verify
--trainer megatron --matrix 4`.

Axes: dp, cp, tp, pp, ep. Options of `--set`: `sequence_parallel`, `distributed_optimizer` (ZeRO-1, with Adam; otherwise
SGD with momentum), `virtual_stages`, `experts` (of each layer, two for a token), `expert_tp` (the degree of tp in
experts, tp's by default), `aux_loss` (the factor of the balance loss of experts), `tied` (embedding and head),
`sinks` (a learned logit of each head, GPT-OSS). Two options leave a default of the library as it is: `per_token=false`,
with which the loss is the mean of the means of micro-batches and data ranks, and `overlap_p2p=false`, without overlap
of the messages of virtual stages. The layers are the library's own without Transformer Engine. `megatron_cpu.py` has
the stand-ins for CUDA and for attention over cp.

Shapes: B sequences, T tokens.
"""

import warnings
from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer import TransformerConfig
from megatron.core.utils import get_batch_on_this_cp_rank
from torch import Tensor

from shardwright.data.samples import IGNORE
from shardwright.hugging_face.float64 import Float64
from shardwright.model.spec import ModelSpec
from shardwright.parallel.boxes import TensorShard
from shardwright.system.errors import InputError
from shardwright.verification.trainers.adapter import StepBatch, World
from shardwright.verification.trainers.megatron_cpu import run_without_cuda
from shardwright.verification.trainers.pieces import expert_problem

warnings.filterwarnings("ignore", module="megatron")
run_without_cuda()
_SHARDED = {
    "word_embeddings.weight": 0,
    "output_layer.weight": 0,
    "linear_qkv.weight": 0,
    "softmax_offset": 0,
    "linear_proj.weight": 1,
    "linear_fc1.weight": 0,
    "linear_fc2.weight": 1,
}
"""The dim of a parameter that is sharded over tp, by the end of its name; others are whole on every rank."""
_NO_LIMIT = 1e30
"""A norm above every norm: without a limit the library does not compute the norm."""


class MegatronTrainer:
    """The chunks of this rank's stage in the library's DDP, and its optimizer."""

    AXES = ("dp", "cp", "tp", "pp", "ep")

    @staticmethod
    def problem(spec: ModelSpec, axes: Mapping[str, int], options: Mapping[str, Any]) -> str | None:
        """Return why the degrees do not fit the model, or None."""
        experts, stages = options.get("experts", 0), axes["pp"] * _chunks(axes, options)
        sizes = [("n_kv_heads", spec.n_kv_heads, axes["tp"]), ("n_layers", spec.n_layers, stages)]
        sizes += [("d_ffn", spec.d_ffn, axes["tp"]), ("vocab_size", spec.vocab_size, axes["tp"])]
        for name, size, parts in sizes:
            if size % parts:
                return f"{parts} parts do not divide {name}={size}; --set model.{name}={parts}"
        if problem := expert_problem(axes["ep"], options):
            return problem
        if (over := options.get("expert_tp", 1)) != 1:
            ranks = axes["dp"] * axes["cp"] * axes["tp"]
            if not experts or type(over) is not int or over < 1 or ranks % (over * axes["ep"]):
                return f"expert_tp={over} goes with experts, and expert_tp x ep divides the {ranks} ranks of a stage"
        if experts == 1 or (options.get("aux_loss", 0.0) and not experts):
            return f"experts={experts}: a token takes two experts, and aux_loss balances them; --set experts=4"
        if axes["tp"] > 1 and experts and not options.get("sequence_parallel", False):
            return "Megatron Core trains experts over tp only with --set sequence_parallel=true"
        return None

    def __init__(self, spec: ModelSpec, world: World) -> None:
        options, self.axes = world.options, world.axes
        self.mode = Float64 if world.dtype == torch.float64 else nullcontext
        self.is_zero, self.n_experts = options.get("distributed_optimizer", False), options.get("experts", 0)
        self.expert_tp = options.get("expert_tp", world.axes["tp"]) if world.size > 1 else 1
        virtual = _chunks(world.axes, options)
        self._initialise(virtual)
        self.data_ranks = parallel_state.get_data_parallel_world_size()
        self.data_rank = parallel_state.get_data_parallel_rank()
        tied, config = options.get("tied", False), _config(spec, world, self.expert_tp)
        ddp = DistributedDataParallelConfig(use_distributed_optimizer=self.is_zero)
        layer = get_gpt_layer_local_spec(
            num_experts=self.n_experts or None, moe_grouped_gemm=False, normalization="RMSNorm"
        )
        self.chunks: list[Any] = []
        for chunk in range(virtual):
            of_chunk = {"vp_stage": chunk} if virtual > 1 else {}
            model = GPTModel(
                config,
                layer,
                vocab_size=spec.vocab_size,
                max_sequence_length=spec.max_seq_len,
                position_embedding_type="rope",
                share_embeddings_and_output_weights=tied,
                pre_process=parallel_state.is_pipeline_first_stage(ignore_virtual=False, **of_chunk),
                post_process=parallel_state.is_pipeline_last_stage(ignore_virtual=False, **of_chunk),
                **of_chunk,
            )
            for block in model.decoder.layers if config.softmax_type == "learnable" else ():
                torch.nn.init.normal_(block.self_attention.core_attention.softmax_offset)
            self.chunks.append(DistributedDataParallel(config, ddp, model))
        settings = OptimizerConfig(
            optimizer="adam" if self.is_zero else "sgd",
            lr=0.01,
            weight_decay=0.0,
            params_dtype=world.dtype,
            use_distributed_optimizer=self.is_zero,
        )
        self.optimizer: Any = get_megatron_optimizer(settings, self.chunks)

    def _initialise(self, virtual: int) -> None:
        """Make the library's process groups, which live as long as the process or until others are needed."""
        if parallel_state.is_initialized():
            parallel_state.destroy_model_parallel()
        parallel_state.initialize_model_parallel(
            self.axes["tp"],
            self.axes["pp"],
            virtual if virtual > 1 else None,
            context_parallel_size=self.axes["cp"],
            expert_model_parallel_size=self.axes["ep"],
            expert_tensor_parallel_size=self.expert_tp,
        )

    def _named(self) -> Iterator[tuple[str, Any]]:
        """Yield each parameter with its name in the whole model: layers and experts are numbered there."""
        ep_rank = parallel_state.get_expert_model_parallel_rank()
        for chunk in self.chunks:
            numbers = [block.layer_number - 1 for block in chunk.module.decoder.layers]
            for name, parameter in chunk.module.named_parameters():
                words = name.split(".")
                if words[:2] == ["decoder", "layers"]:
                    words[2] = str(numbers[int(words[2])])
                if "local_experts" in words:
                    place = words.index("local_experts") + 1
                    words[place] = str(int(words[place]) + ep_rank * (self.n_experts // self.axes["ep"]))
                if chunk.module.share_embeddings_and_output_weights and words[0] == "output_layer":
                    words = ["embedding", "word_embeddings", "weight"]  # the last stage's copy
                yield ".".join(words), parameter

    def _shards(self, tensors: Mapping[Any, Tensor]) -> Iterator[tuple[str, TensorShard]]:
        """Yield the shard of each tensor, given by its parameter. The two matrices of a gated feed-forward network,
        which a rank keeps together, have names of their own."""
        for name, parameter in self._named():
            dim = next((dim for end, dim in _SHARDED.items() if name.endswith(end)), None)
            n = self.expert_tp if "local_experts" in name else self.axes["tp"]
            rank = parallel_state.get_tensor_model_parallel_rank() % n
            parts = {name: tensors[parameter]}
            if name.endswith("linear_fc1.weight"):
                gate, up = tensors[parameter].chunk(2)
                parts = {name.replace("fc1", "fc1.gate"): gate, name.replace("fc1", "fc1.up"): up}
            for key, part in parts.items():
                offsets = tuple(rank * size if at == dim else 0 for at, size in enumerate(part.shape))
                whole = tuple(n * size if at == dim else size for at, size in enumerate(part.shape))
                yield key, TensorShard(part, offsets, whole)

    def load(self, weights: Mapping[str, Tensor]) -> None:
        for name, shard in self.parameters().items():
            box = tuple(slice(at, at + n) for at, n in zip(shard.offsets, shard.tensor.shape, strict=True))
            shard.tensor.copy_(weights[name][box])

    def step(self, batch: StepBatch) -> float | None:
        sums: list[Tensor] = []
        limit = batch.clip_norm if batch.clip_norm < float("inf") else _NO_LIMIT
        for optimizer in (self.optimizer, *getattr(self.optimizer, "chained_optimizers", ())):
            optimizer.config.clip_grad = limit
        for group in self.optimizer.param_groups:
            group["lr"] = batch.lr
        for chunk in self.chunks:
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()
        n_sequences, n_tokens = batch.micro_batches[0][0].shape
        if (parts := 2 * self.axes["cp"]) > 2 and n_tokens % parts:
            raise InputError(
                f"cp={parts // 2}: {parts} parts do not divide {n_tokens} tokens; --set batch.seq_len={parts}"
            )
        models = self.chunks if len(self.chunks) > 1 else self.chunks[0]
        samples = [iter(batch.micro_batches) for _ in self.chunks]
        with self.mode():
            get_forward_backward_func()(
                forward_step_func=partial(_forward, sums),
                data_iterator=samples if len(samples) > 1 else samples[0],
                model=models,
                num_microbatches=len(batch.micro_batches),
                seq_length=n_tokens,
                micro_batch_size=n_sequences,
                forward_only=False,
            )
            self.last = {parameter: gradient.clone() for parameter, gradient in self._gradients()}
            _, norm, _ = self.optimizer.step()
        self.norm = float(norm)
        if not sums:
            return None  # the last stage has the loss
        total = torch.stack(sums).sum()
        dist.all_reduce(total, group=parallel_state.get_data_parallel_group(with_context_parallel=True))
        return total.item() / batch.n_targets

    def _gradients(self) -> Iterator[tuple[Any, Tensor]]:
        """Yield the reduced gradient of each parameter; ZeRO-1 leaves each rank a part of each bucket."""
        for chunk in self.chunks:
            for buffer in chunk.buffers + chunk.expert_parallel_buffers:
                whole = buffer.grad_data
                if self.is_zero:
                    whole = torch.empty_like(whole)
                    for bucket in buffer.buckets:
                        group, n = buffer.data_parallel_group, buffer.data_parallel_world_size
                        own = bucket.grad_data.chunk(n)[dist.get_rank(group)].contiguous()
                        place = whole[bucket.offset : bucket.offset + bucket.grad_data.numel()]
                        dist.all_gather_into_tensor(place, own, group=group)
                for parameter, (start, end, *_) in buffer.param_index_map.items():
                    yield parameter, whole[start:end].view(parameter.shape)

    def gradients(self) -> dict[str, Any]:
        return dict(self._shards(self.last))

    def gradient_norm(self) -> float:
        return self.norm

    def parameters(self) -> dict[str, Any]:
        return dict(self._shards({parameter: parameter.detach() for _, parameter in self._named()}))


def _config(spec: ModelSpec, world: World, expert_tp: int) -> TransformerConfig:
    """Return the library's configuration of a model and the degrees of the axes."""
    options, tp = world.options, world.axes["tp"]
    virtual, n_experts, aux_loss = _chunks(world.axes, options), options.get("experts", 0), options.get("aux_loss", 0.0)
    overlaps = options.get("overlap_p2p", True) and virtual > 1
    mixture: dict[str, Any] = {
        "num_moe_experts": n_experts,
        "moe_ffn_hidden_size": spec.d_ffn,
        "moe_router_topk": 2,
        "moe_token_dispatcher_type": "alltoall",
        "moe_router_load_balancing_type": "aux_loss" if aux_loss else "none",
        "moe_aux_loss_coeff": aux_loss,
    }
    return TransformerConfig(
        num_layers=spec.n_layers,
        hidden_size=spec.d_model,
        num_attention_heads=spec.n_heads,
        num_query_groups=spec.n_kv_heads,
        ffn_hidden_size=spec.d_ffn,
        normalization="RMSNorm",
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        add_bias_linear=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        softmax_type="learnable" if options.get("sinks", False) else "vanilla",
        tensor_model_parallel_size=tp,
        sequence_parallel=options.get("sequence_parallel", False) and tp > 1,
        pipeline_model_parallel_size=world.axes["pp"],
        virtual_pipeline_model_parallel_size=virtual if virtual > 1 else None,
        context_parallel_size=world.axes["cp"],
        expert_model_parallel_size=world.axes["ep"],
        expert_tensor_parallel_size=expert_tp,
        pipeline_dtype=world.dtype,
        params_dtype=world.dtype,
        use_cpu_initialization=True,
        gradient_accumulation_fusion=False,
        finalize_model_grads_func=finalize_model_grads,
        deallocate_pipeline_outputs=False,
        overlap_p2p_comm=overlaps,
        batch_p2p_comm=not overlaps,
        bias_activation_fusion=False,
        calculate_per_token_loss=options.get("per_token", True),
        **(mixture if n_experts else {}),
    )


def _chunks(axes: Mapping[str, int], options: Mapping[str, Any]) -> int:
    """Return the chunks of a stage. The reference, of one stage, has one chunk."""
    n_chunks: int = options.get("virtual_stages", 1)
    return n_chunks if axes["pp"] > 1 else 1


def _forward(sums: list[Tensor], samples: Iterator[tuple[Tensor, Tensor]], model: Any) -> tuple[Any, Any]:
    """Return the output of a chunk of the model, and the function of the loss, which the last stage calls."""
    tokens_BT, targets_BT = next(samples)
    n_tokens = tokens_BT.shape[1]
    whole = {
        "tokens": tokens_BT,
        "labels": targets_BT.clamp(min=0),
        "loss_mask": targets_BT != IGNORE,
        "attention_mask": torch.ones(n_tokens, n_tokens, dtype=torch.bool).triu(1)[None, None],
        "position_ids": torch.arange(n_tokens).expand_as(tokens_BT),
    }
    batch = get_batch_on_this_cp_rank(whole)

    def loss_of(losses_BT: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        loss = (losses_BT * batch["loss_mask"]).sum()
        sums.append(loss.detach().clone())
        return loss, batch["loss_mask"].sum().int(), {}

    return model(batch["tokens"], batch["position_ids"], batch["attention_mask"], labels=batch["labels"]), loss_of


Trainer = MegatronTrainer
