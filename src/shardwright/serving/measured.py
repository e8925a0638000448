"""A table of published measurements of serving: its columns, and the run that each row describes.

`docs/serving.md` explains the columns. An empty cell was not stated by the source.

InferenceX starts one server for each length of prompts and answers and each concurrency. `server` has the settings in
which its scripts differ from an engine's defaults. Source: the scripts in benchmarks/ of
github.com/SemiAnalysisAI/InferenceX (InferenceMAX until 2025): dsr1_fp8_h200_trt_slurm.sh (2e46dba),
dsr1_fp8_h200.sh (161e7f6), and 70b_fp8_h200_trt_slurm.sh as in github.com/jyothisambolu/InferenceMAX (1b563c8). A later
commit of InferenceX (73ef922) lowers the latter's max_num_tokens to the longest request; with it, 128 prompts at a time
would wait three times as long as measured. 70b_fp8_h200_slurm.sh, of vLLM, has the defaults. These are settings, as
the lengths are: nothing here is fitted.
"""

import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from shardwright.cost.hardware import Cluster, accelerator, cluster, node_size
from shardwright.model.spec import ModelSpec
from shardwright.planner.run_columns import choice_column, decimal_column, text_column, whole_column
from shardwright.planner.runs import ReadRow, TableKind, read_rows
from shardwright.serving.engines import ENGINES, UNNAMED, ServingEngine, engine_of
from shardwright.serving.formats import CACHE_BYTES, FORMATS, computed_in
from shardwright.serving.models import named
from shardwright.serving.setting import Degrees
from shardwright.split.rules import experts_problem
from shardwright.system.errors import InputError
from shardwright.system.units import division_problem

METRICS = ("output_tokens_per_s", "total_tokens_per_s", "ttft_s", "tpot_s", "e2e_latency_s")
"""Metrics that a row may measure. Tokens per second are summed over all its accelerators."""
STATIC, LOOP, FULL = "static batch", "closed loop", "maximum load"
MOST = 999_999_999
"""Largest whole number of a cell."""
_KNOWN = ", ".join(dict.fromkeys(engine.name.partition("-")[0] for engine in ENGINES))


@dataclass(frozen=True, kw_only=True)
class ServingTableRow:
    """A row of the table as read; the fields are its columns. A cell that is not valid is None."""

    id: str = text_column("unique name of the row", "always")
    source_id: str = text_column("short name of the source; errors are averaged over its rows", "always")
    source: str = text_column("long name of the source")
    table: str = text_column("table of the source")
    model: str = text_column("name as published", "always")
    accelerator: str = text_column("name as published", "always")
    n_accelerators: int | None = whole_column("of an instance. Empty: tp x pp x dp", MOST)
    tp: int | None = whole_column("tensor parallelism. Empty: all accelerators", MOST)
    pp: int | None = whole_column("stages. Empty: 1", MOST)
    ep: int | None = whole_column("expert parallelism. Empty: 1", MOST)
    dp: int | None = whole_column("dp attention. Empty: 1", MOST)
    precision_weights: str | None = choice_column("of the weights. Empty: precision_compute, or bf16", *FORMATS)
    precision_kv: str | None = choice_column(
        "of the cache. Empty: fp8 if TensorRT-LLM or vLLM has fp8 weights, else 16 bits", *CACHE_BYTES
    )
    precision_compute: str | None = choice_column("of the matmuls", *FORMATS)
    input_len: int | None = whole_column("tokens of a prompt. A row without it is skipped", MOST)
    output_len: int | None = whole_column("tokens of an answer. A row without it is skipped", MOST)
    batch_or_concurrency: int | None = whole_column("requests at a time. Empty: not limited by the client", MOST)
    metric: str = choice_column("the measured quantity; tokens/s are of all accelerators", *METRICS, needed="always")
    value: float = decimal_column("of the metric", 1e-6, 10**12, "always")
    notes: str = text_column(
        "remarks. Engine and version are read from notes, source_id and source; so are static, closed loop and "
        "infinite rate"
    )


@dataclass(frozen=True)
class ServingCase:
    """The run that a row describes. `regime`: STATIC, LOOP or FULL. `requests`: number in the whole batch, 0 if not
    stated. `shortest`: the least length of a request, as a share of the stated length, which is the maximum; lengths
    between are equally frequent. `assumed`: values that the row does not state."""

    line: ServingTableRow
    model: ModelSpec
    model_name: str
    cluster: Cluster
    engine: ServingEngine
    degrees: Degrees
    precision: str
    kv_precision: str
    input_len: int
    output_len: int
    requests: int
    regime: str
    shortest: float
    measured: float
    assumed: tuple[str, ...]


@dataclass(frozen=True)
class SkippedServingRow:
    """A row without a prediction, and the reason. `name`: its id, or its line in the file. `metric`, `measured`: a cell
    that is not valid as its text."""

    name: str
    source: str
    metric: str
    measured: float | str
    reason: str


MEASUREMENTS_TABLE = TableKind(
    ServingTableRow, lambda *_: {"always": True}, lambda _: iter(()), "docs/serving.md#a-table-of-your-own"
)


def read(path: Path) -> list[ServingCase | SkippedServingRow]:
    """Return every row of a table; a row with cells that are not valid, or that cannot be priced, is skipped.

    Raises InputError with every problem of the columns, and for rows of another width or with equal ids.
    """
    return [_invalid(read) if read.problems else _case(read.row) for read in read_rows(path, MEASUREMENTS_TABLE)]


def skipped(line: ServingTableRow, error: InputError) -> SkippedServingRow:
    """Return a valid row that cannot be priced."""
    return SkippedServingRow(line.id, line.source_id, line.metric, line.value, error.problems[0])


def _invalid(read: ReadRow[ServingTableRow]) -> SkippedServingRow:
    """Return a row with problems."""
    row, cells = read.row, read.cells
    name, measured = row.id or f"line {read.line}", cells["value"] if row.value is None else row.value
    return SkippedServingRow(name, row.source_id, cells["metric"], measured, "; ".join(read.problems))


def _case(line: ServingTableRow) -> ServingCase | SkippedServingRow:
    """Return the run that a row describes, or the reason why it cannot be priced."""
    try:
        return _priced(line)
    except InputError as error:
        return skipped(line, error)


def _priced(line: ServingTableRow) -> ServingCase:
    model_name, model = named(line.model)
    chip = accelerator(line.accelerator)
    engine = _engine(line)
    if line.input_len is None or line.output_len is None:
        raise InputError("the lengths of prompts and answers are not stated")
    assumed: list[str] = []
    if engine is None:
        engine = UNNAMED
        assumed.append(f"no engine is named: one of today; {_KNOWN} are known")
    degrees = _degrees(line, model, assumed)
    precision = line.precision_weights or line.precision_compute
    if not precision:
        precision = "bf16"
        assumed.append("weights and matmuls in bf16")
    if computed_in(precision, chip) is None:
        raise InputError(f"{chip.name} has no matmuls in {precision}")
    lengths, requests = (line.input_len, line.output_len), line.batch_or_concurrency or 0
    if CLIENT in line.notes:
        engine = server(engine, model_name, chip.name, degrees, lengths, requests)
        assumed.append("the server is started as the scripts of InferenceX do")
    return ServingCase(
        line=line, model=model, model_name=model_name, cluster=_cluster(chip.name, degrees.size), engine=engine,
        degrees=degrees, precision=precision, kv_precision=_kv_precision(line, engine, precision, assumed),
        input_len=lengths[0], output_len=lengths[1], requests=requests, regime=_regime(line, engine),
        shortest=0.8 if "0.8 to 1.0" in line.notes else 1.0, measured=line.value, assumed=tuple(assumed),
    )  # fmt: skip


def _engine(line: ServingTableRow) -> ServingEngine | None:
    """Return the engine that a row names, None if it names none. `ENGINE: X` in the notes overrides all other words."""
    explicit = re.search(r"ENGINE: (\w+)", line.notes)
    if explicit:
        engine = engine_of(explicit[1])
        if engine is None:
            raise InputError(f"the engine {explicit[1]} has no constants; {_KNOWN} have")
        return engine
    return engine_of(line.notes.partition(";")[0]) or engine_of(f"{line.source_id} {line.notes} {line.source}")


def _degrees(line: ServingTableRow, model: ModelSpec, assumed: list[str]) -> Degrees:
    pp, dp = line.pp or 1, line.dp or 1
    n = line.n_accelerators or (line.tp or 1) * pp * dp
    tp = line.tp or n // (pp * dp)
    if not line.tp:
        assumed.append(f"tp {tp}, as many as there are accelerators")
    if tp * pp * dp != n:
        raise InputError(f"tp {tp} x pp {pp} x dp {dp} = {tp * pp * dp}, not n_accelerators={n}")
    ep = line.ep or 1
    problems = (
        experts_problem("ep", ep, model.n_experts),
        division_problem("ep", ep, tp * dp, f"tp x dp = {tp * dp}", shown=False),
        division_problem("tp", tp, model.n_heads, f"{model.n_heads} query heads"),
    )
    if broken := [problem for problem in problems if problem]:
        raise InputError(*broken)
    return Degrees(tp, pp, dp, ep)


def _cluster(name: str, size: int) -> Cluster:
    """Return the smallest cluster of full nodes, or part of a node, that has room for an instance."""
    usual = cluster(f"{name}:1/1")
    node = min(size, node_size(name))
    return cluster(f"{name}:{-(-size // node) * node}/{node}") if size > 1 else usual


def _kv_precision(line: ServingTableRow, engine: ServingEngine, precision: str, assumed: list[str]) -> str:
    if line.precision_kv:
        return line.precision_kv
    by_blocks = ("block" in line.notes or "deepseek" in line.model.lower()) and CLIENT not in line.notes
    kv_precision = "fp8" if precision == "fp8" and engine.kv_fp8 and not by_blocks else "bf16"
    assumed.append(f"cache in {kv_precision}")
    return kv_precision


def _regime(line: ServingTableRow, engine: ServingEngine) -> str:
    """Return how requests arrived: as one static batch, in a closed loop at a concurrency, or at an infinite rate."""
    if line.metric == "e2e_latency_s" or "static" in line.notes:
        return STATIC
    if not line.batch_or_concurrency or re.search("infinite rate|benchmark_throughput", line.notes):
        return FULL
    return STATIC if not engine.mixed else LOOP


def as_json(case: ServingCase) -> dict[str, Any]:
    """Return the run that a row describes as JSON."""
    return {
        "model": case.model_name,
        "accelerator": case.cluster.accelerator.name,
        "engine": case.engine.name,
        "layout": case.degrees._asdict(),
        "regime": case.regime,
        "assumed": list(case.assumed),
    }


CLIENT = "InferenceX client"
"""Words in the notes of a row that InferenceX measured."""


def server(
    engine: ServingEngine, model: str, chip: str, degrees: Degrees, lengths: tuple[int, int], requests: int
) -> ServingEngine:
    """Return the engine as InferenceX starts it for `requests` at a time, of at most `lengths` (prompt, answer)."""
    match chip, model, engine.name:
        case "h200", "llama-3.1-70b", "trtllm-1":
            engine = replace(engine, max_tokens=16384)
            if lengths == (1024, 1024) and degrees.tp < 8:
                return replace(engine, hold_passes=20, hold_share=0.9)
        case "h200", "deepseek-v3", "trtllm-1":
            prompt_and_others = -(-(requests + lengths[0] + 64) // 64) * 64
            engine = replace(engine, max_tokens=degrees.dp * prompt_and_others, cache_share=0.75)
            if degrees.dp > 1:
                return replace(engine, hold_passes=60, hold_prompts=prompts_to_fill(degrees.dp))
        case "h200", "deepseek-v3", "sglang":
            return replace(engine, max_tokens=32768, memory_share=0.82)
    return engine


def prompts_to_fill(ranks: int) -> float:
    """Return the expected number of prompts until each rank has one, if each goes to a random rank."""
    return ranks * sum(1 / k for k in range(1, ranks + 1))
