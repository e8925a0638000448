"""What a run came to, in a few numbers and two lines of words."""

import math
from dataclasses import dataclass
from statistics import median

from shardwright.layout import Layout
from shardwright.model.presets import resolve
from shardwright.report.run import RunRecord
from shardwright.report.timeline import PipelineNumbers
from shardwright.run_folder import PHASES
from shardwright.units import format_bytes, format_count, format_seconds, percent


@dataclass(frozen=True)
class Headline:
    """The numbers of a run; None is a number that is not known, or is not finite."""

    steps: int
    planned_steps: int
    tokens: int
    parameters: int
    world_size: int
    train_loss: float | None
    first_held_out_loss: float | None
    held_out_loss: float | None
    first_non_finite_step: int | None
    median_tokens_per_s: float | None
    median_mfu: float | None
    peak_memory_bytes: int | None
    training_s: float | None
    time_share: dict[str, float] | None
    pipeline: PipelineNumbers | None
    load_max_over_mean: float | None
    load_of_worst_layer: float | None
    load_entropy: float | None
    dropped_fraction: float | None
    expert_sent_bytes: float | None

    def rows(self) -> list[tuple[str, str, str]]:
        """For people: the name, value and a remark, which may be empty, of each number that is known."""
        planned = "" if self.steps >= self.planned_steps else f"of {self.planned_steps:,} planned"
        rows = [("steps", f"{self.steps:,}", planned), ("tokens", format_count(self.tokens), "")]
        first, last = self.first_held_out_loss, self.held_out_loss
        if last is not None:
            fell = f"from {first:.4f}, {last / first:.0%} of it" if first is not None else ""
            rows.append(("held-out loss", f"{last:.4f}", fell))
        if self.train_loss is not None:
            rows.append(("training loss", f"{self.train_loss:.4f}", "last logged step"))
        if self.load_max_over_mean is not None and self.load_of_worst_layer is not None:
            dropped = "" if self.dropped_fraction is None else f"; dropped {percent(self.dropped_fraction)}"
            worst = f"busiest expert beside the mean; worst layer {self.load_of_worst_layer:.2f}{dropped}"
            rows.append(("load of experts", f"{self.load_max_over_mean:.2f}", worst))
        if self.expert_sent_bytes is not None:
            rows.append(("sent for experts", format_bytes(self.expert_sent_bytes), "a step, by rank 0"))
        if self.median_tokens_per_s is not None:
            mfu = "n/a" if self.median_mfu is None else f"{self.median_mfu:.1%}"
            rows.append(("tokens per second", format_count(self.median_tokens_per_s), f"median; MFU {mfu}"))
        if self.peak_memory_bytes is not None:
            rows.append(("peak memory", format_bytes(self.peak_memory_bytes), "rank 0"))
        if self.training_s is not None:
            rows.append(("time in steps", format_seconds(self.training_s), "without evaluations and checkpoints"))
        if self.time_share is not None:
            share = {phase: percent(value) for phase, value in self.time_share.items()}
            rest = f"of the time in steps; data {share['data']}, optimizer {share['optimizer']}"
            rows.append(("forward + backward", share["forward_backward"], rest))
        return rows


def headline(run: RunRecord) -> Headline:
    """The numbers of a run.

    `training_s` is the time in steps, by the logged means; evaluations and checkpoints are not in it.
    `time_share` divides it over data, forward_backward and optimizer. Memory is that of rank 0. What is said of
    experts, and the bytes that rank 0 sends in a step for them, is that of the last record.
    """
    n_steps = [after - before for before, after in zip(run.edges, run.edges[1:], strict=False)]
    seconds = {
        phase: sum(n * getattr(record, f"{phase}_s") for n, record in zip(n_steps, run.train, strict=True))
        for phase in PHASES
    }
    training_s = sum(seconds.values())
    speeds = [record.tokens_per_s for record in run.train]
    mfu = [record.mfu for record in run.train if record.mfu is not None]
    bad = [step for step, loss in run.losses if not math.isfinite(loss)]
    last = run.train[-1] if run.train else None
    return Headline(
        steps=run.last_step,
        planned_steps=run.config.steps,
        tokens=run.last_step * run.tokens_per_step,
        parameters=run.config.model.spec().n_parameters,
        world_size=run.config.layout.layout().world_size,
        train_loss=_finite(last.loss) if last else None,
        first_held_out_loss=_finite(run.held_out[0].loss) if run.held_out else None,
        held_out_loss=_finite(run.held_out[-1].loss) if run.held_out else None,
        first_non_finite_step=bad[0] if bad else None,
        median_tokens_per_s=median(speeds) if speeds else None,
        median_mfu=median(mfu) if mfu else None,
        peak_memory_bytes=max((record.memory_bytes for record in run.train), default=None),
        training_s=training_s if run.train else None,
        time_share={phase: seconds[phase] / training_s for phase in PHASES} if training_s > 0 else None,
        pipeline=None if run.pipeline is None else run.pipeline.numbers,
        load_max_over_mean=last.load_max_over_mean if last else None,
        load_of_worst_layer=max(last.load_by_layer, default=None) if last else None,
        load_entropy=last.load_entropy if last else None,
        dropped_fraction=last.dropped_fraction if last else None,
        expert_sent_bytes=last.expert_sent_bytes if last else None,
    )


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def title_of(run: RunRecord) -> str:
    """`smollm2-135m, 135M parameters, on 8 ranks with ZeRO-3`."""
    return f"{model_in_words(run)}, on {layout_in_words(run.config.layout.layout())}"


def model_in_words(run: RunRecord) -> str:
    """`smollm2-135m, 135M parameters`, or `Llama-style, 4.56M parameters` where the run file changes its sizes; of a
    mixture of experts also how many of them a token uses."""
    model = run.config.model
    spec = model.spec()
    style = "GPT" if spec.norm == "layernorm" else "Qwen3" if spec.qk_norm else "Llama"
    name = model.preset if spec == resolve(model.preset) else f"{style}-style"
    active = "" if spec.moe is None else f", {format_count(spec.n_active_parameters)} active"
    return f"{name}, {format_count(spec.n_parameters)} parameters{active}"


def layout_in_words(layout: Layout) -> str:
    """How the ranks share the work: `8 ranks with ZeRO-3`, `8 ranks: 2 replicas of ZeRO-3 over 4`."""
    if layout.world_size == 1:
        return "1 rank"
    parts: list[str] = []
    if layout.zero and layout.dp_shard == layout.world_size and layout.ep == 1:
        return f"{layout.world_size} ranks with ZeRO-{layout.zero}"
    if layout.zero and layout.dp_shard > 1:
        copies = f"{layout.dp_replicate} replicas of " if layout.dp_replicate > 1 else ""
        parts.append(f"{copies}ZeRO-{layout.zero} over {layout.dp_shard}")
    elif layout.data_ranks > 1:
        parts.append(f"{layout.data_ranks} full copies of the model")
    parts += [f"{axis} {layout.degree(axis)}" for axis in ("cp", "tp", "pp", "ep") if layout.degree(axis) > 1]
    return f"{layout.world_size} ranks: {', '.join(parts)}"
