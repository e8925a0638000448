"""The document of `plan rl`: the fastest step with its parts and layouts, what bounds it, and what would help."""

from collections.abc import Iterator
from dataclasses import asdict
from functools import partial
from typing import Any

from shardwright.planner.explain import lines
from shardwright.planner.nearest import adapters_in_words
from shardwright.report.plan_pictures import ROLES, time_svg
from shardwright.report.plan_view import formula_parts
from shardwright.rl.explain import explain_step
from shardwright.rl.search import RLPlan, split_text
from shardwright.rl.step import GENERATION, RLStep, RLTask
from shardwright.system.units import counted, format_bytes, format_count, format_seconds
from shardwright.view.document import (
    SECONDS,
    WHOLE_SHARE,
    Column,
    Fact,
    Facts,
    Note,
    Part,
    Picture,
    Quantity,
    Section,
    Table,
    VerbDocument,
)


def rl_document(plan: RLPlan, name: str, explained: bool = False) -> VerbDocument:
    """Return the document of a plan for the model `name`. `explained`: with every formula of the fastest step."""
    data = rl_data(plan, name)
    parts: list[Part] = [*_task_notes(plan.task, name)]
    if plan.best:
        parts += [*_best(plan, plan.best[0]), *_others(plan)]
    else:
        parts.append(Note("no split of the accelerators fits", tone="bad"))
    parts += [Note(why, split, "bad") for split, why in plan.unfit.items()]
    if explained and plan.best:
        entries = explain_step(plan.best[0])
        data["formulas"] = [vars(entry) for entry in entries]
        parts += formula_parts(lines(entries))
    return VerbDocument(f"{name} on {plan.task.cluster.name}: a step of GRPO", data, parts)


def _task_notes(task: RLTask, name: str) -> Iterator[Note]:
    answers = task.answers
    n_answers, tokens = counted(task.n_answers, "answer"), counted(task.prompt_len, "token")
    yield Note(
        f"{name}, {format_count(task.job.model.n_parameters)} parameters{_adapters(task)}, on {task.cluster.name}: "
        f"{n_answers} a step to prompts of {tokens}, trained in {counted(task.n_updates, 'update')}"
    )
    yield Note(
        f"answers of {answers.mean:,.0f} tokens on average, {answers.percentile(0.95):,.0f} for 95 of 100, at most "
        f"{answers.maximum:,}, which {answers.cut_share:.1%} reach; packed into "
        f"{counted(task.sequences, 'sequence')} of {task.job.seq_len:,} an update"
    )


def _adapters(task: RLTask) -> str:
    lora = task.job.model.lora
    return "" if lora is None else f" with adapters of rank {lora.rank}, {adapters_in_words(task.job.model)}"


def _split(step: RLStep) -> str:
    return split_text(step.generation.size * step.separate, step.training.size)


def _best(plan: RLPlan, best: RLStep) -> Iterator[Part]:
    transfer, task = best.transfer, plan.task
    yield Section(f"fastest: {_split(best)}")
    moved = (
        f"{format_bytes(transfer.between_nodes_bytes)} between nodes and {format_bytes(transfer.inside_bytes)} inside"
    )
    sent = f", {format_bytes(transfer.broadcast_bytes)} on to each rank that generates" * best.separate
    pool, peak = best.generation, format_bytes(best.training.estimate.peak_bytes)
    room = f"with {counted(pool.answers, 'answer')} each; the cache has room for {pool.room:,.0f}"
    received = f"in which a rank that trains receives {moved}{sent}"
    yield Facts([
        Fact("step", format_seconds(best.total_s), f"{best.tokens_per_s:,.0f} tokens/s of each accelerator"),
        Fact("generation", str(pool.layout), room),
        Fact("training", best.training.text, f"with a peak memory of {peak}"),
        Fact("weight transfer", format_seconds(transfer.seconds), received),
    ])  # fmt: skip
    hidden = best.hidden()
    rows = [
        (name, seconds, seconds / best.total_s, "overlaps with the other accelerators' work" if name in hidden else "")
        for name, seconds in best.parts_s.items()
    ]
    yield Table((Column("part"), Column("time", SECONDS), Column("of the step", WHOLE_SHARE), Column("")), rows)
    yield Note(bound(best), "bound")
    if plan.remedies:
        yield Section("What would help")
        changes = [
            (": ".join(filter(None, (remedy.options, remedy.what))), remedy.total_s, remedy.total_s / best.total_s - 1)
            for remedy in plan.remedies
        ]
        yield Table(
            (Column("change"), Column("step", SECONDS), Column("difference", Quantity("{:+.0%}".format))), changes
        )
    if task.job.model.lora is not None:
        yield Note(
            f"only the adapters are sent, {format_bytes(transfer.whole_bytes)} in 16 bits; the engine has the base "
            f"weights from the start and applies the adapters next to them, which is not priced; the reference is the "
            f"policy without adapters"
        )
    if not task.off_policy_steps and best.separate:
        yield Note("on policy, each half of the accelerators waits while the other works")


def bound(step: RLStep) -> str:
    """Return the part that bounds the step."""
    name, seconds = max(
        ((name, seconds) for name, seconds in step.parts_s.items() if name not in step.hidden()),
        key=lambda pair: pair[1],
    )
    tail = step.generation.tail_s
    last = f", {format_seconds(tail)} of it for the longest tenth of the answers" if tail and name == GENERATION else ""
    return f"{name} takes {seconds / step.total_s:.0%} of the step{last}"


def _others(plan: RLPlan) -> Iterator[Part]:
    yield Section("Splits of the accelerators, each with its fastest layouts")
    columns = Column("split"), Column("step", SECONDS), Column("generation"), Column("training")
    rows = [(_split(step), step.total_s, step.generation.layout, step.training.text) for step in plan.best]
    yield Table(columns, rows)
    bars = [
        (_split(step), {part: s for part, s in step.parts_s.items() if part not in step.hidden()}, step.total_s)
        for step in plan.best
    ]
    caption = "The seconds of a step by part, for each split with its fastest layouts; parts that overlap are left out."
    yield Picture("time", "Time by part", partial(time_svg, bars), caption, (ROLES[0], ROLES[1]))


def rl_data(plan: RLPlan, name: str) -> dict[str, Any]:
    """Return a plan as JSON data."""
    task, answers = plan.task, plan.task.answers
    return {
        "model": name,
        "lora": None if task.job.model.lora is None else asdict(task.job.model.lora),
        "cluster": task.cluster.name,
        "prompt_len": task.prompt_len,
        "output_len": {"mean": answers.mean, "p95": answers.percentile(0.95), "max": answers.maximum},
        "answers": task.n_answers,
        "updates": task.n_updates,
        "off_policy_steps": task.off_policy_steps,
        "reference": task.reference,
        "best": [_step_data(step) for step in plan.best],
        "unfit": plan.unfit,
        "remedies": [vars(remedy) for remedy in plan.remedies],
    }


def _step_data(step: RLStep) -> dict[str, Any]:
    return {
        "step_s": step.total_s,
        "tokens_per_s_per_accelerator": step.tokens_per_s,
        "separate": step.separate,
        "generation_accelerators": step.generation.size,
        "training_accelerators": step.training.size,
        "generation": {**step.generation.layout.as_json(), "tail_s": step.generation.tail_s},
        "training": step.training.text,
        "parts_s": step.parts_s,
        "hidden": list(step.hidden()),
        "bound": bound(step),
        "transfer": vars(step.transfer),
    }
