"""The headline numbers of a run, and its title."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from statistics import median

from shardwright.config.mixture import mixtures_of, name_of, sources_of
from shardwright.report.run_record import RunRecord, RunSegment
from shardwright.report.timeline import PipelineNumbers
from shardwright.report.words import model_in_words
from shardwright.runs.folder import PHASES
from shardwright.system.units import format_bytes, format_count, format_seconds, percent
from shardwright.view.document import Fact

SEGMENTS_SHOWN = 8
"""Most layouts of a run whose speed is shown: the newest."""

IDLE_LOAD, COLLAPSE_RECORDS = 0.1, 5
"""An expert is reported as collapsed if it had less than this fraction of its layer's mean load in each of the last
records, at least this many."""

ALIKE = 0.95
"""The cosine above which two experts are named: of their weights, or of their rows of a router, whose logits are then
nearly proportional."""


@dataclass(frozen=True)
class SegmentNumbers:
    """The speed of a run on one layout: medians over the train records, None if no record has the number."""

    steps: str
    layout: str
    world_size: int | None
    median_tokens_per_s: float | None
    median_mfu: float | None


@dataclass(frozen=True)
class SourceNumbers:
    """One source of a data mixture: its share of the samples in each stage, from 0 to 1; the number of times that the
    run read it; its first and last validation loss. None: not known."""

    name: str
    shares: tuple[float, ...]
    epochs: float | None
    first_validation_loss: float | None
    validation_loss: float | None

    def fact(self) -> Fact:
        epochs = "n/a" if self.epochs is None else f"{self.epochs:.3g}"
        parts = [f"epochs; share {', then '.join(map(percent, self.shares))}"]
        if self.validation_loss is not None:
            first = self.first_validation_loss
            fell = f" from {first:.4f}" if first is not None else ""
            parts.append(f"validation loss {self.validation_loss:.4f}{fell}")
        return Fact(f"source {self.name}", epochs, "; ".join(parts))


@dataclass(frozen=True)
class RunHeadline:
    """The headline numbers of a run; None: not known or not finite. World size, `median_tokens_per_s` and `median_mfu`
    are of the last segment."""

    steps: int
    planned_steps: int
    tokens: int
    parameters: int
    world_size: int
    train_loss: float | None
    mtp_loss: float | None
    margin: float | None
    accuracy: float | None
    first_validation_loss: float | None
    validation_loss: float | None
    validation_perplexity: float | None
    validation_accuracy: float | None
    average_loss: float | None
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
    router_similarity: float | None
    """The largest cosine of two experts' rows of a router."""
    expert_similarity: float | None
    """The largest cosine of the weights of two experts of a layer."""
    similar_experts: dict[int, tuple[int, int]]
    """By layer, the two experts whose weights are the most similar, if above `ALIKE`."""
    collapsed_experts: dict[int, tuple[int, ...]]
    """By layer, the experts that few tokens have picked in the last records (`collapsed_experts`)."""
    dropped_fraction: float | None
    expert_sent_bytes: float | None
    segments: tuple[SegmentNumbers, ...]
    sources: tuple[SourceNumbers, ...]

    def facts(self) -> Iterator[Fact]:
        """Yield each number that is known."""
        planned = "" if self.steps >= self.planned_steps else f"of {self.planned_steps:,} planned"
        yield Fact("steps", f"{self.steps:,}", planned)
        yield Fact("tokens", format_count(self.tokens))
        yield from self._losses()
        yield from (source.fact() for source in self.sources)
        yield from self._experts()
        for segment in self.segments[-SEGMENTS_SHOWN:]:
            if segment.median_tokens_per_s is not None:
                mfu = "n/a" if segment.median_mfu is None else f"{segment.median_mfu:.1%}"
                where = f" of {segment.steps} on {segment.layout}" if len(self.segments) > 1 else ""
                speed = format_count(segment.median_tokens_per_s)
                yield Fact("tokens per second", speed, f"as the median{where}; MFU {mfu}")
        if self.peak_memory_bytes is not None:
            yield Fact("peak memory", format_bytes(self.peak_memory_bytes), "on rank 0")
        if self.training_s is not None:
            yield Fact("time in steps", format_seconds(self.training_s), "without evaluations and checkpoints")
        if self.time_share is not None:
            share = {phase: percent(value) for phase, value in self.time_share.items()}
            rest = f"of the time in steps; data {share['data']}, optimizer {share['optimizer']}"
            yield Fact("forward + backward", share["forward_backward"], rest)
        if (step := self.pipeline) is not None:
            seconds = f"{format_seconds(step.makespan_s)}, planned {format_seconds(step.makespan_planned_s)}"
            rest = f"measured, {step.bubble_planned:.1%} planned by {step.schedule}; step {step.step:,} took {seconds}"
            yield Fact("bubble of the pipeline", f"{step.bubble_measured:.1%}", rest)

    def _losses(self) -> Iterator[Fact]:
        first, last = self.first_validation_loss, self.validation_loss
        if last is not None:
            words = [f"from {first:.4f}, {last / first:.0%} of it"] if first else []
            if self.validation_accuracy is not None:
                words.append(f"the chosen answer leads in {self.validation_accuracy:.1%} of the pairs")
            elif self.margin is None:
                known = self.validation_perplexity
                words.insert(0, "with no finite perplexity" if known is None else f"at perplexity {known:,.4g}")
            yield Fact("validation loss", f"{last:.4f}", "; ".join(words))
        if self.average_loss is not None:
            yield Fact("of the average", f"{self.average_loss:.4f}", "validation loss of the average of the weights")
        if self.train_loss is not None:
            yield Fact("training loss", f"{self.train_loss:.4f}", "at the last logged step")
        if self.mtp_loss is not None:
            yield Fact("multi-token loss", f"{self.mtp_loss:.4f}", "at the last logged step; mean of the modules")
        if self.margin is not None and self.accuracy is not None:
            leads = f"at the last logged step; the chosen answer leads in {self.accuracy:.1%} of the pairs"
            yield Fact("margin", f"{self.margin:.4f}", leads)

    def _experts(self) -> Iterator[Fact]:
        if self.load_max_over_mean is not None and self.load_of_worst_layer is not None:
            dropped = "" if self.dropped_fraction is None else f"; dropped {percent(self.dropped_fraction)}"
            worst = f"times the mean for the busiest expert; worst layer {self.load_of_worst_layer:.2f}{dropped}"
            yield Fact("load of experts", f"{self.load_max_over_mean:.2f}", worst)
        if self.load_entropy is not None:
            yield Fact("entropy of the load", f"{self.load_entropy:.3f}", "1 is even, 0 is one expert for all tokens")
        if self.router_similarity is not None:
            alike = (
                "; their logits are nearly proportional, except for biases" if self.router_similarity > ALIKE else ""
            )
            rest = f"the largest cosine of two experts' rows of a router{alike}"
            yield Fact("similarity of routing", f"{self.router_similarity:.3f}", rest)
        if self.expert_similarity is not None:
            pairs = (f"layer {layer}: {first} and {other}" for layer, (first, other) in self.similar_experts.items())
            named = f"; above {ALIKE:g}: {'; '.join(pairs)}" if self.similar_experts else ""
            rest = f"the largest cosine of two experts' weights, at the last evaluation{named}"
            yield Fact("similarity of experts", f"{self.expert_similarity:.3f}", rest)
        if self.collapsed_experts:
            by_layer = "; ".join(
                f"layer {layer}: {', '.join(map(str, experts))}" for layer, experts in self.collapsed_experts.items()
            )
            rest = f"with less than {IDLE_LOAD:.0%} of the mean load in the last {COLLAPSE_RECORDS} records: {by_layer}"
            yield Fact("collapsed experts", str(sum(map(len, self.collapsed_experts.values()))), rest)
        if self.expert_sent_bytes is not None:
            yield Fact("sent for experts", format_bytes(self.expert_sent_bytes), "a step, by rank 0")


def headline(run: RunRecord) -> RunHeadline:
    """Return the headline numbers of a run.

    `training_s` is the time in steps, from the logged means, without evaluations and checkpoints. `time_share` divides
    it into data, forward_backward and optimizer. Memory is rank 0's. The load of experts, and the bytes that rank 0
    sends for experts in a step, are from the last record.
    """
    n_steps = [after - before for before, after in zip(run.edges, run.edges[1:], strict=False)]
    seconds = {
        phase: sum(n * getattr(record, f"{phase}_s") for n, record in zip(n_steps, run.train, strict=True))
        for phase in PHASES
    }
    training_s = sum(seconds.values())
    segments = tuple(map(_segment_numbers, run.segments))
    bad = [step for step, loss in run.losses if not math.isfinite(loss)]
    last = run.train[-1] if run.train else None
    similar = run.validation[-1] if run.validation else None
    validation_loss = _finite(run.validation[-1].loss) if run.validation else None
    of_pairs = run.config.preference.kind != "none"  # whose loss is no cross-entropy
    return RunHeadline(
        steps=run.last_step,
        planned_steps=run.config.steps,
        tokens=run.tokens(run.last_step),
        parameters=run.config.spec().n_parameters,
        world_size=run.config.layout.layout().world_size,
        train_loss=_finite(last.loss) if last else None,
        mtp_loss=_finite(last.mtp_loss) if last and last.mtp_loss is not None else None,
        margin=_finite(last.margin) if last and last.margin is not None else None,
        accuracy=_finite(last.accuracy) if last and last.accuracy is not None else None,
        first_validation_loss=_finite(run.validation[0].loss) if run.validation else None,
        validation_loss=validation_loss,
        validation_perplexity=None if validation_loss is None or of_pairs else _exp(validation_loss),
        validation_accuracy=run.validation[-1].accuracy if run.validation else None,
        average_loss=run.average_losses[-1][1] if run.average_losses else None,
        first_non_finite_step=bad[0] if bad else None,
        median_tokens_per_s=segments[-1].median_tokens_per_s,
        median_mfu=segments[-1].median_mfu,
        peak_memory_bytes=max((record.memory_bytes for record in run.train), default=None),
        training_s=training_s if run.train else None,
        time_share={phase: seconds[phase] / training_s for phase in PHASES} if training_s > 0 else None,
        pipeline=None if run.pipeline is None else run.pipeline.numbers,
        load_max_over_mean=last.load_max_over_mean if last else None,
        load_of_worst_layer=max(last.load_by_layer, default=None) if last else None,
        load_entropy=last.load_entropy if last else None,
        router_similarity=max(last.router_similarity_by_layer, default=None) if last else None,
        expert_similarity=max(similar.expert_similarity_by_layer, default=None) if similar else None,
        similar_experts=similar_pairs(run),
        collapsed_experts=collapsed_experts(run),
        dropped_fraction=last.dropped_fraction if last else None,
        expert_sent_bytes=last.expert_sent_bytes if last else None,
        segments=segments,
        sources=tuple(_source_numbers(run)) if run.config.data.sources else (),
    )


def similar_pairs(run: RunRecord) -> dict[int, tuple[int, int]]:
    """Return for each layer its two most similar experts at the last evaluation, if their cosine is above `ALIKE`."""
    spec = run.config.spec()
    layers = [layer for layer in range(spec.n_blocks) if spec.has_experts(layer)]
    last = run.validation[-1] if run.validation else None
    if last is None or not len(layers) == len(last.expert_similarity_by_layer) == len(last.most_similar_experts):
        return {}
    rows = zip(layers, last.expert_similarity_by_layer, last.most_similar_experts, strict=True)
    return {layer: pair for layer, cosine, pair in rows if cosine > ALIKE}


def collapsed_experts(run: RunRecord) -> dict[int, tuple[int, ...]]:
    """Return for each layer the experts that had less than `IDLE_LOAD` of its mean load in each of the last
    `COLLAPSE_RECORDS` records; empty with fewer records, or if records have the loads of one layer alone."""
    spec = run.config.spec()
    layers = [layer for layer in range(spec.n_layers) if spec.has_experts(layer)]
    loads = [record.tokens_by_expert for record in run.train[-COLLAPSE_RECORDS:]]
    if len(loads) < COLLAPSE_RECORDS or any(len(load) != len(layers) for load in loads):
        return {}
    result = {}
    for place, layer in enumerate(layers):
        idle = [
            {expert for expert, n in enumerate(load[place]) if n * len(load[place]) < IDLE_LOAD * sum(load[place])}
            for load in loads
        ]
        if always := set.intersection(*idle):
            result[layer] = tuple(sorted(always))
    return result


def _source_numbers(run: RunRecord) -> Iterator[SourceNumbers]:
    mixtures = mixtures_of(run.config.data)
    epochs = (run.train[-1].epochs or {}) if run.train else {}
    for place, name in enumerate(map(name_of, sources_of(run.config.data))):
        losses = [record.sources[name] for record in run.validation if record.sources and name in record.sources]
        yield SourceNumbers(
            name=name,
            shares=tuple(mixture.weights[place] / sum(mixture.weights) for mixture in mixtures),
            epochs=epochs.get(name),
            first_validation_loss=_finite(losses[0]) if losses else None,
            validation_loss=_finite(losses[-1]) if losses else None,
        )


def _segment_numbers(segment: RunSegment) -> SegmentNumbers:
    mfu = [record.mfu for record in segment.train if record.mfu is not None]
    speeds = [record.tokens_per_s for record in segment.train]
    return SegmentNumbers(
        steps=segment.steps,
        layout=segment.layout,
        world_size=segment.world_size,
        median_tokens_per_s=median(speeds) if speeds else None,
        median_mfu=median(mfu) if mfu else None,
    )


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _exp(loss: float) -> float | None:
    """Return the exponential of a loss, or None if it is not a finite number."""
    return math.exp(loss) if loss < 700 else None


def title_of(run: RunRecord) -> str:
    """Return, for example, `smollm2-135m, 135M parameters, on 8 ranks with ZeRO-3`. Two layouts are both named."""
    layouts = [segment.layout for segment in run.segments]
    where = f"{len(layouts)} layouts in turn" if len(layouts) > 2 else ", then ".join(layouts)
    return f"{model_in_words(run.config)}, on {where}"
