"""Text with every formula behind a prediction and its numbers: the ledger of the cost model (`cost.ledger`)."""

from collections.abc import Iterator, Sequence
from itertools import groupby

from shardwright.cost import ledger, memory
from shardwright.cost.blocks import blocks
from shardwright.cost.ledger import NOTATION, LedgerEntry, Number
from shardwright.cost.step import step_time
from shardwright.model.modules import end_rows
from shardwright.planner.choice import PricedLayout
from shardwright.planner.headline import headline
from shardwright.system.units import MiB, format_bytes


def explain(priced: PricedLayout) -> list[LedgerEntry]:
    """Return the ledger entries from the batch to the step time, section by section."""
    job, candidates = priced.job, priced.choice.candidates
    estimate, _ = priced.memory, priced.time  # before recording, so that `headline` does not record each formula again
    with ledger.record() as entries:
        _batch(priced)
        _parameters(priced)
        memory.note_fullest(job, candidates, estimate)
        step_time(job, candidates)
        headline(priced)
    sections = list(dict.fromkeys(entry.section for entry in entries))
    return sorted(entries, key=lambda entry: sections.index(entry.section))


def lines(entries: Sequence[LedgerEntry]) -> Iterator[str]:
    """Yield the entries by section, grouped by formula, and last the symbols."""
    for section, inside in groupby(entries, key=lambda entry: entry.section):
        yield ""
        yield section
        alike: dict[tuple[str, ...], list[LedgerEntry]] = {}
        for entry in inside:
            alike.setdefault((entry.formula or entry.what, entry.unit), []).append(entry)
        for those in alike.values():
            if len(those) == 1 and "; " not in those[0].formula:
                yield f"  {_line(those[0])}"
            else:
                yield from _table(those)
    used = {name for entry in entries for name in entry.inputs}
    yield ""
    yield "Symbols; other names are those of lines above"
    for unit, meaning, names in dict.fromkeys(NOTATION[name] for name in NOTATION if name in used):
        yield f"  {', '.join(names.split())}: {meaning}{f' ({unit})' if unit else ''}"


def _table(entries: Sequence[LedgerEntry]) -> Iterator[str]:
    """Yield the entries of one formula: the formula, the inputs that all entries share, and a line for each entry."""
    first = entries[0]
    shared = {name: n for name, n in first.inputs.items() if all(entry.inputs[name] == n for entry in entries)}
    for step in first.formula.split("; "):
        yield f"  {step}"
    if shared:
        yield f"    with {_written(shared)}{_source(first)}"
    for entry in entries:
        own = _written({name: value for name, value in entry.inputs.items() if name not in shared})
        yield f"    {entry.what}{':' * bool(own)} {own}{' ' * bool(own)}= {value_text(entry.value, entry.unit)}"


def _line(entry: LedgerEntry) -> str:
    """Return `what = formula = the formula with numbers = value (source)`."""
    numbers = ledger.substituted(entry.formula, {name: number(value) for name, value in entry.inputs.items()})
    steps = [entry.what, entry.formula, numbers if entry.formula not in entry.inputs else ""]
    steps = [step for at, step in enumerate(steps) if step and step not in steps[:at]]
    return " = ".join([*steps, value_text(entry.value, entry.unit)]) + _source(entry)


def _source(entry: LedgerEntry) -> str:
    return f" ({entry.source})" if entry.source else ""


def _written(inputs: dict[str, Number]) -> str:
    return ", ".join(f"{name} {number(value)}" for name, value in inputs.items())


def value_text(value: Number, unit: str) -> str:
    """Return the value of an entry with its unit as text."""
    if isinstance(value, float) and unit == "B" and value >= MiB:
        return f"{number(value)} B, {format_bytes(value)}"
    return f"{number(value)} {unit}".strip()


def number(value: Number) -> str:
    """Return the value of an entry as text."""
    if isinstance(value, tuple):
        return f"({', '.join(map(number, value))})"
    return str(int(value)) if value.is_integer() and abs(value) < 1e12 else f"{value:.6g}"


def _batch(priced: PricedLayout) -> None:
    job, candidates = priced.job, priced.choice.candidates
    tokens, m = candidates.tokens(job.seq_len), candidates.microbatches(job.global_batch)
    sizes: ledger.Inputs = {
        **{name: getattr(candidates, name) for name in ("micro_batch", "cp", "tp", "ep", "dp_replicate", "dp_shard")},
        "global_batch": job.global_batch,
        "s": job.seq_len,
        "data_ranks": candidates.data_ranks,
        "T": tokens,
        "token_shards": candidates.token_shards,
    }
    with ledger.section("Batch"):
        ledger.note("tokens of a step", "global_batch * s", job.tokens, "tokens", **sizes)
        ledger.note("data ranks", "dp_replicate * dp_shard", candidates.data_ranks, "ranks", **sizes)
        ledger.note("m", "global_batch / (micro_batch * data_ranks)", m, "", "micro-batches", **sizes)
        ledger.note("T", "micro_batch * s / cp", tokens, "tokens", "of a micro-batch on a rank", **sizes)
        ledger.note(
            "T_shard", "T / token_shards", tokens / candidates.token_shards, "tokens", "between matmuls", **sizes
        )
        if candidates.zero[0]:
            ledger.note("shards", "dp_shard * cp", candidates.shards, "ranks", "that share P", **sizes)
        if candidates.zero[0] and job.model.moe is not None:
            formula = "max(dp_shard * cp * tp // ep, 1)"
            ledger.note("expert shards", formula, candidates.expert_shards, "ranks", "that share Q", **sizes)


def _parameters(priced: PricedLayout) -> None:
    """Record the parameter count of each block, of the embedding, norm and head, and of the model."""
    spec = priced.job.model
    with ledger.section("Parameters of the model"):
        terms: dict[str, tuple[int, int]] = {}
        for block, layers in blocks(spec).items():
            rows = {row.name: row.numel for row in block.rows if row.counted}
            what = f"parameters of {block.name}"
            terms[ledger.identifier(what)] = (len(layers), _rows(what, rows))
        ends = {row.name: row.numel for row in end_rows(spec)}
        terms["embedding_norm_head"] = (1, _rows("embedding, norm, head", ends))
        formula = " + ".join(f"{count} * {name}" for name, (count, _) in terms.items())
        ledger.note("model", formula, spec.n_parameters, "", "exact", **{name: n for name, (_, n) in terms.items()})


def _rows(what: str, numel: dict[str, int]) -> int:
    """Record the number of elements of some parameter rows, named as in the model."""
    total = sum(numel.values())
    names = ledger.identified(numel)
    ledger.note(what, " + ".join(names), total, "", "model/modules.py", **names)
    return total
