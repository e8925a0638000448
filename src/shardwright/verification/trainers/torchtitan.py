"""torchtitan's Trainer with a Llama 3, or a Qwen3 with experts, on CPUs: `shardwright verify --trainer torchtitan
--matrix 4 --set batch.seq_len=512 --set model.max_seq_len=512`.

Axes: dp_replicate, dp_shard, cp, tp, pp, ep; the ranks of ep are data ranks, which torchtitan takes from dp_shard. A
step is `Trainer.train_step`; loss and norm are the values that it logs, and `gradients()` returns the gradients after
clipping. The optimizer is AdamW. Options of `--set`: `experts` (their number; float64 alone), `ep_over_tp` (experts
over tp too), `spmd_backend` (partial_dtensor by default, or full_dtensor; torchtitan's default, spmd_types, needs a
PyTorch after 2.13), `tied` (embedding and head), `sequence_parallel`, `load_balancer` of cp (headtail, ptrr, none),
`schedule` of pp, `chunked` (the loss by chunks of the sequence), `reshard` (`fsdp_reshard_after_forward`) and
`recompute` (none, selective, full). One process recomputes nothing. `import torchtitan` needs the package triton, on
CPUs too. `torchtitan_cpu.py` has the stand-ins for CUDA.

Shapes: B sequences, T tokens.
"""

import logging
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from copy import copy
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.pipelining.schedules import PipelineScheduleMulti, get_schedule_class
from torchtitan.components.loss import ChunkedLossWrapper, CrossEntropyLoss
from torchtitan.components.metrics import MetricsProcessor
from torchtitan.components.optimizer import (
    OptimizersContainer,
    ParamGroupConfig,
    register_moe_load_balancing_hook,
)
from torchtitan.config import TORCH_DTYPE_MAP, DebugConfig, ParallelismConfig, TrainingConfig
from torchtitan.distributed import ParallelDims
from torchtitan.distributed.activation_checkpoint import FullAC, SelectiveAC
from torchtitan.models import llama3, qwen3
from torchtitan.models.common import ComplexRoPE, Embedding, Linear, RMSNorm
from torchtitan.models.common.attention import FlexAttention
from torchtitan.models.common.config_utils import (
    make_ffn_config,
    make_gqa_config,
    make_moe_config,
    make_routed_experts_config,
    make_router_config,
)
from torchtitan.protocols.model_spec import ModelSpec as TitanSpec
from torchtitan.trainer import Trainer as TitanTrainer

from shardwright.hugging_face.float64 import Float64
from shardwright.model.spec import ModelSpec
from shardwright.system.errors import InputError
from shardwright.system.torch_private import recomputed_module, take_micro_batches
from shardwright.verification.trainers.adapter import StepBatch, World
from shardwright.verification.trainers.pieces import (
    expert_problem,
    experts_of,
    load_weights,
    set_environment,
)
from shardwright.verification.trainers.torchtitan_cpu import run_without_cuda

logging.getLogger().setLevel(logging.ERROR)
logging.getLogger("torchtitan").setLevel(logging.ERROR)
logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)  # about speed
run_without_cuda()
TORCH_DTYPE_MAP["float64"] = torch.float64
_RECOMPUTE = {"none": None, "selective": SelectiveAC.Config(), "full": FullAC.Config()}


class _Made:
    """Stands for the configuration of a part, whose method `build` the Trainer calls."""

    def __init__(self, make: Callable[..., Any]) -> None:
        self.make = make

    def build(self, **given: Any) -> Any:
        return self.make(**given)


def _none(**given: Any) -> None:
    """Stands for the tokenizer and for the loader of data: each step is given its tokens."""


class _LastNumbers(MetricsProcessor):
    """Keeps the loss and the norm of the last step, as the Trainer logs them."""

    def log(self, step: int, loss: float, largest_loss: float, norm: float, *_: Any, **__: Any) -> None:
        self.last_loss, self.last_norm = loss, norm


class _OneMesh(TitanTrainer):
    """A Trainer on the meshes of the process's earlier Trainers: DTensor keeps the first of equal meshes in caches, and
    `fully_shard` refuses another."""

    known: ClassVar[dict[tuple[Any, ...], ParallelDims]] = {}

    def init_distributed(self) -> ParallelDims:
        dims = super().init_distributed()
        key = (*(getattr(dims, axis) for axis in TorchtitanTrainer.AXES), dims.spmd_backend)
        return self.known.setdefault(key, dims)


class TorchtitanTrainer:
    """torchtitan's Trainer. The first step makes it again for the sizes of its batch."""

    AXES = ("dp_replicate", "dp_shard", "cp", "tp", "pp", "ep")

    @staticmethod
    def problem(spec: ModelSpec, axes: Mapping[str, int], options: Mapping[str, Any]) -> str | None:
        """Return why the degrees do not fit the model, or None."""
        if spec.n_kv_heads % axes["tp"]:
            return f"tp={axes['tp']} does not divide n_kv_heads={spec.n_kv_heads}; --set model.n_kv_heads={axes['tp']}"
        if axes["pp"] > 1 and options.get("tied", False):
            return "torchtitan has no tied embedding with pp; leave pp or tied out"
        if problem := expert_problem(_expert_degree(axes, options), options):
            return problem
        if spec.n_layers + 2 < (stages := axes["pp"] * _stages_of_rank(options)):
            return f"{spec.n_layers} layers, embedding and head are not {stages} stages; --set model.n_layers={stages}"
        return None

    def __init__(self, spec: ModelSpec, world: World) -> None:
        set_environment(world)
        torch.autograd.set_multithreading_enabled(False)  # torchtitan does it where it makes the process group
        self.spec, self.world = spec, world
        self.mode = Float64 if world.dtype == torch.float64 else nullcontext
        self.weights: Mapping[str, Tensor] = {}
        self._make((1, spec.max_seq_len, world.axes["pp"] * _stages_of_rank(world.options)))

    def _make(self, sizes: tuple[int, int, int]) -> None:
        """Make the Trainer for micro-batches of a size (B, T), and their number."""
        self.sizes = sizes
        try:
            with self.mode():
                self.trainer: Any = _OneMesh(_config(self.spec, self.world, sizes))
        except ValueError as error:
            raise InputError(f"torchtitan refuses the configuration: {error}") from None
        if self.world.axes["pp"] > 1:
            take_micro_batches(self.trainer.pp_schedule)
        for part in self.trainer.model_parts:
            for module in part.modules():
                if isinstance(module, FSDPModule):
                    module.set_force_sum_reduction_for_comms(True)  # gloo has no pre-multiplied sum
                if (block := recomputed_module(module)) is not None:
                    block.forward = _within(self.mode, block.forward)  # a backward pass runs without the mode
        dims = self.trainer.parallel_dims
        self.data_ranks = dims.dp_replicate * dims.dp_shard
        self.data_rank = dims.get_mesh("batch").get_local_rank() if dims.dp_enabled else 0
        for optimizer in self.trainer.optimizers:
            optimizer.register_step_pre_hook(self._keep_gradients)
        self.last: dict[str, Any] = {}

    def _keep_gradients(self, *_: Any) -> None:
        self.last = {name: None if p.grad is None else p.grad.detach().clone() for name, p in self.parameters().items()}

    def load(self, weights: Mapping[str, Tensor]) -> None:
        self.weights = weights
        load_weights(self.parameters(), weights)

    def step(self, batch: StepBatch) -> float | None:
        n_sequences, n_tokens = batch.micro_batches[0][0].shape
        if (block := 128 * self.world.axes["cp"]) > 128 and n_tokens % block:
            raise InputError(
                f"cp={block // 128}: PyTorch shards masks in blocks of 128 tokens, and a sequence has {n_tokens}; "
                f"--set batch.seq_len={block} --set model.max_seq_len={block}"
            )
        if (sizes := (n_sequences, n_tokens, len(batch.micro_batches))) != self.sizes:
            self._make(sizes)
            load_weights(self.parameters(), self.weights)
        trainer = self.trainer
        trainer.step += 1
        trainer.config.training.max_norm = batch.clip_norm
        for optimizer in trainer.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = batch.lr
        positions_BT = torch.arange(n_tokens).expand(n_sequences, -1)
        rows = [({"input": tokens, "positions": positions_BT}, targets) for tokens, targets in batch.micro_batches]
        with self.mode():
            trainer.train_step(iter(rows))
        has_loss = self.world.axes["pp"] == 1 or trainer.pp_has_last_stage
        return trainer.metrics_processor.last_loss if has_loss else None

    def gradients(self) -> dict[str, Any]:
        return self.last

    def gradient_norm(self) -> float:
        norm: float = self.trainer.metrics_processor.last_norm
        return norm

    def parameters(self) -> dict[str, Any]:
        return {
            name.replace("_checkpoint_wrapped_module.", ""): p
            for part in self.trainer.model_parts
            for name, p in part.named_parameters()
        }


def _within(mode: Callable[[], AbstractContextManager[Any]], call: Callable[..., Any]) -> Callable[..., Any]:
    """Return `call` within a mode of its own."""

    def call_within(*arguments: Any, **named: Any) -> Any:
        with mode():
            return call(*arguments, **named)

    return call_within


def _expert_degree(axes: Mapping[str, int], options: Mapping[str, Any]) -> int:
    """Return the number of ranks that share the experts: of ep, and of tp too with `ep_over_tp`."""
    return axes["ep"] * (axes["tp"] if options.get("ep_over_tp", False) else 1)


def _stages_of_rank(options: Mapping[str, Any]) -> int:
    """Return the stages of a rank: two for schedules with several."""
    name = options.get("schedule", "1F1B")
    try:
        return 2 if issubclass(get_schedule_class(name), PipelineScheduleMulti) else 1
    except ValueError as error:
        raise InputError(f"schedule={name}: {error}") from None


def _config(spec: ModelSpec, world: World, sizes: tuple[int, int, int]) -> Any:
    """Return the configuration of a Trainer. `sizes`: sequences and tokens of a micro-batch, and their number."""
    n_sequences, n_tokens, n_micro_batches = sizes
    axes, options, dtype = world.axes, world.options, str(world.dtype).removeprefix("torch.")
    pipelined = axes["pp"] > 1
    local_batch = n_sequences * (n_micro_batches if pipelined else 1)
    loss: Any = CrossEntropyLoss.Config(global_vocab_size=spec.vocab_size)
    recompute = options.get("recompute", "none")
    if recompute not in _RECOMPUTE:
        raise InputError(f"recompute={recompute}: valid: {', '.join(_RECOMPUTE)}")
    n_experts = experts_of(options)
    if n_experts and dtype != "float64":
        raise InputError(f"experts={n_experts}: torchtitan multiplies experts in bfloat16; leave out --dtype {dtype}")
    if options.get("spmd_backend") == "spmd_types":
        raise InputError(
            f"spmd_backend=spmd_types: fully_shard of PyTorch {torch.__version__} refuses its parameters; valid: "
            f"partial_dtensor, full_dtensor"
        )
    named: Any = {"dtype": dtype, "mixed_precision_param": dtype, "mixed_precision_reduce": dtype}
    return TitanTrainer.Config(
        model_spec=TitanSpec(
            name="qwen3" if n_experts else "llama3",
            flavor="small",
            model=_model(spec, options.get("tied", False), n_experts),
            parallelize_fn=qwen3.parallelize_qwen3 if n_experts else llama3.parallelize_llama,
            pipelining_fn=llama3.pipeline_llm,
            post_optimizer_build_fn=register_moe_load_balancing_hook if n_experts else None,
            state_dict_adapter=None,
        ),
        tokenizer=_Made(_none),
        dataloader=_Made(_none),
        metrics=_Made(partial(_LastNumbers, MetricsProcessor.Config(log_freq=1))),
        optimizer=OptimizersContainer.Config(
            param_groups=[
                ParamGroupConfig(
                    pattern=".*", optimizer_name="AdamW", optimizer_kwargs={"lr": 0.01, "weight_decay": 0.0}
                )
            ],
            implementation="for-loop",
        ),
        training=TrainingConfig(
            local_batch_size=local_batch,
            global_batch_size=n_sequences * n_micro_batches * axes["dp_replicate"] * axes["dp_shard"] * axes["ep"],
            seq_len=n_tokens,
            disable_cuda_graphs=True,
            **named,
        ),
        parallelism=_parallelism(world, n_sequences),
        activation_checkpoint=None if world.size == 1 else _RECOMPUTE[recompute],  # one process recomputes nothing
        debug=DebugConfig(seed=world.seed, enable_structured_logging=False),
        loss=ChunkedLossWrapper.Config(loss_fn=loss) if options.get("chunked", False) else loss,
    )


def _parallelism(world: World, n_sequences: int) -> ParallelismConfig:
    """Return the degrees and options of a Trainer with micro-batches of `n_sequences`."""
    axes, options, balancer = world.axes, world.options, world.options.get("load_balancer", "headtail")
    return ParallelismConfig(
        data_parallel_replicate_degree=axes["dp_replicate"],
        data_parallel_shard_degree=axes["dp_shard"] * axes["ep"],  # torchtitan takes the ranks of ep from dp_shard
        context_parallel_degree=axes["cp"],
        context_parallel_load_balancer=None if balancer == "none" else balancer,
        tensor_parallel_degree=axes["tp"],
        expert_parallel_degree=_expert_degree(axes, options),
        fsdp_reshard_after_forward=options.get("reshard", "default"),
        enable_sequence_parallel=options.get("sequence_parallel", True),
        pipeline_parallel_degree=axes["pp"],
        pipeline_parallel_microbatch_size=n_sequences,
        pipeline_parallel_schedule=options.get("schedule", "1F1B"),
        spmd_backend=options.get("spmd_backend", "partial_dtensor"),
    )


def _model(spec: ModelSpec, tied: bool, n_experts: int) -> Any:
    """Return the configuration of a Llama 3 of these sizes, or of a Qwen3 whose layers have `n_experts` experts, two
    for each token, and a shared expert. `tied`: embedding and head are one matrix."""
    width, hidden, vocabulary = spec.d_model, spec.d_ffn, spec.vocab_size
    init, norm_init = {"weight": partial(nn.init.normal_, std=0.05)}, {"weight": nn.init.ones_}
    norm = RMSNorm.Config(normalized_shape=width, param_init=norm_init)
    head_norm = RMSNorm.Config(normalized_shape=width // spec.n_heads, param_init=norm_init)
    rope = ComplexRoPE.Config(dim=width // spec.n_heads, max_seq_len=spec.max_seq_len)
    block: Any = qwen3.Qwen3TransformerBlock if n_experts else llama3.Llama3TransformerBlock
    model: Any = qwen3.Qwen3Model if n_experts else llama3.Llama3Model

    def layer() -> Any:
        ffn = make_ffn_config(dim=width, hidden_dim=hidden, w1_param_init=init, w2w3_param_init=init)
        router: Any = {"score_func": "softmax", "route_norm": True, "gate_param_init": init}
        shared: Any = {"num_experts": n_experts, "top_k": 2}
        experts = {"param_init": dict.fromkeys(("w1_EFD", "w2_EDF", "w3_EFD"), init["weight"])}
        mixture = make_moe_config(
            num_experts=n_experts,
            router=make_router_config(dim=width, **shared, **router),
            routed_experts=make_routed_experts_config(
                dim=width, hidden_dim=hidden, comm_backend="standard", **shared, **experts
            ),
            shared_experts=ffn,
        )
        return block.Config(
            attention_norm=copy(norm),
            ffn_norm=copy(norm),
            attention=make_gqa_config(
                dim=width,
                n_heads=spec.n_heads,
                n_kv_heads=spec.n_kv_heads,
                head_dim=width // spec.n_heads,
                wqkv_param_init=init,
                wo_param_init=init,
                inner_attention=FlexAttention.Config(),
                fuse_qkv=True,
                rope=copy(rope),
                qk_norm=head_norm if n_experts else None,
            ),
            **{"moe": mixture} if n_experts else {"feed_forward": ffn},
        )

    return model.Config(
        dim=width,
        vocab_size=vocabulary,
        enable_weight_tying=tied,
        tok_embeddings=Embedding.Config(num_embeddings=vocabulary, embedding_dim=width, param_init=init),
        norm=norm,
        lm_head=Linear.Config(in_features=width, out_features=vocabulary, param_init=init),
        layers=[layer() for _ in range(spec.n_layers)],
    )


Trainer = TorchtitanTrainer
