"""A run in words: its model, its layout, the state of each rank, and its learning rate."""

from shardwright.config import RunConfig
from shardwright.config.batch import BatchStage
from shardwright.layout.layout import Layout
from shardwright.model.presets import resolve
from shardwright.system.units import format_count


def model_in_words(config: RunConfig) -> str:
    """Return `smollm2-135m, 135M parameters`, or `Llama-style, 4.56M parameters` if the run file changes its sizes.
    For a mixture of experts, the number of parameters that a token uses is added."""
    model = config.model
    spec = model.spec()
    qk_norm = "OLMo-2" if spec.qk_norm_whole else "Qwen3"
    style = "GPT" if spec.norm == "layernorm" else qk_norm if spec.qk_norm else "Llama"
    name = model.preset if spec == resolve(model.preset) else f"{style}-style"
    active = "" if spec.moe is None else f", {format_count(spec.n_active_parameters)} active"
    return f"{name}, {format_count(spec.n_parameters)} parameters{active}"


def layout_in_words(layout: Layout) -> str:
    """Return the world size and its axes: `8 ranks with ZeRO-3`, `8 ranks: 2 replicas of ZeRO-3 over 4`."""
    if layout.world_size == 1:
        return "1 rank"
    parts: list[str] = []
    if layout.zero and layout.dp_shard == layout.world_size and layout.ep == 1:
        return f"{layout.world_size} ranks with ZeRO-{layout.zero}"
    if layout.zero and layout.dp_shard > 1:
        replicas = f"{layout.dp_replicate} replicas of " if layout.dp_replicate > 1 else ""
        parts.append(f"{replicas}ZeRO-{layout.zero} over {layout.dp_shard}")
    elif layout.data_ranks > 1:
        parts.append(f"{layout.data_ranks} replicas of the model")
    parts += [f"{axis} {layout.degree(axis)}" for axis in ("cp", "tp", "pp", "ep") if layout.degree(axis) > 1]
    return f"{layout.world_size} ranks: {', '.join(parts)}"


def batch_in_words(config: RunConfig) -> list[tuple[BatchStage, str]]:
    """Return each stage of the batch with, for example, `16 sequences of 128 tokens: 2 data ranks x 2 micro-batches x
    4`."""
    ranks, texts = config.layout.layout().data_ranks, []
    of_ranks = f"{ranks:,} data {'rank' if ranks == 1 else 'ranks'}"
    for stage, of_stage in zip(config.batch.schedule.stages, config.by_stage, strict=True):
        n_microbatches = of_stage.accumulation
        of_microbatches = f"{n_microbatches:,} {'micro-batch' if n_microbatches == 1 else 'micro-batches'}"
        texts.append((stage, f"{stage}: {of_ranks} x {of_microbatches} x {stage.micro_batch:,}"))
    return texts


def rank_state_words(layout: Layout) -> str:
    """Return which parameters, gradients and optimizer states one rank holds, by the axes of the layout."""
    parts = []
    if layout.pp > 1:
        parts.append(f"the layers of its stages (pp: {layout.n_stages} stages over {layout.pp} ranks)")
    if layout.tp > 1:
        parts.append(f"1/{layout.tp} of each matmul weight that tp shards, the embedding and the head included")
    if layout.ep > 1:
        parts.append(f"1/{layout.ep} of the experts (ep)")
    n_shards = layout.dp_shard * layout.cp
    if layout.zero == 0 or n_shards == 1:
        if not parts:
            return "Each rank holds all parameters, gradients and optimizer states."
        return f"Each rank holds {_list(parts)}: their parameters, gradients and optimizer states."
    whole, sharded = {
        1: ("the parameters and gradients", "the optimizer states"),
        2: ("the parameters", "the gradients and optimizer states"),
        3: ("", "the parameters, gradients and optimizer states"),
    }[layout.zero]
    share = f"{whole} whole and 1/{n_shards} of {sharded}" if whole else f"1/{n_shards} of {sharded}"
    axes = "dp_shard x cp" if layout.cp > 1 else "dp_shard"
    experts = ""
    if layout.ep > 1 and layout.expert_dp_shard != n_shards:
        experts = (
            f"; of its experts 1/{layout.expert_dp_shard}" if layout.expert_dp_shard > 1 else "; its experts whole"
        )
    zero = f"{share} (ZeRO-{layout.zero} over {axes} = {n_shards}{experts})"
    return f"Each rank holds {_list(parts)}, and of these {zero}." if parts else f"Each rank holds {zero}."


def learning_rate_in_words(config: RunConfig) -> str:
    """Return, for example, `cosine over 100 steps, 10 of warm-up`."""
    schedule = config.lr_schedule
    warmup = f", {schedule.warmup_steps:,} of warm-up" if schedule.warmup_steps else ""
    length = "" if schedule.shape == "constant" else f" over {config.steps:,} steps"
    by = " by tokens" if schedule.by == "tokens" and length else ""
    return f"{schedule.shape}{length}{warmup}{by}"


def _list(parts: list[str]) -> str:
    return " and ".join([", ".join(parts[:-1]), parts[-1]] if len(parts) > 1 else parts)
