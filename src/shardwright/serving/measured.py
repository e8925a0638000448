"""A table of published measurements of serving: its columns, and the run that each row describes.

`docs/serving.md` explains the columns. An empty cell was not stated by the source.

Settings with which InferenceX starts the servers that it measures, if its scripts differ from an engine's defaults.

It starts one server for each length of prompts and answers and each concurrency. Source: the scripts in benchmarks/ of
github.com/SemiAnalysisAI/InferenceX (InferenceMAX until 2025): dsr1_fp8_h200_trt_slurm.sh (2e46dba),
dsr1_fp8_h200.sh (161e7f6), and 70b_fp8_h200_trt_slurm.sh as in github.com/jyothisambolu/InferenceMAX (1b563c8). A later
commit of InferenceX (73ef922) lowers the latter's max_num_tokens to the longest request; with it, 128 prompts at a time
would wait three times as long as measured. 70b_fp8_h200_slurm.sh, of vLLM, has the defaults. These are settings, as
the lengths are: nothing here is fitted.
"""

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from shardwright.cost.hardware import Cluster, accelerator, cluster
from shardwright.model.spec import ModelSpec
from shardwright.serving.engines import ENGINES, UNNAMED, ServingEngine, engine_of
from shardwright.serving.formats import CACHE_BYTES, FORMATS, computed_in
from shardwright.serving.models import named
from shardwright.serving.setting import Degrees
from shardwright.split.rules import experts_divide
from shardwright.system.errors import InputError, nearest
from shardwright.system.files import read_csv, reason

METRICS = ("output_tokens_per_s", "total_tokens_per_s", "ttft_s", "tpot_s", "e2e_latency_s")
"""Metrics that a row may measure. Tokens per second are summed over all its accelerators."""
STATIC, LOOP, FULL = "static batch", "closed loop", "maximum load"
_LONGEST = 60
_KNOWN = ", ".join(dict.fromkeys(engine.name.partition("-")[0] for engine in ENGINES))


@dataclass(frozen=True)
class ServingTableRow:
    """A row of the table as read; the fields are its columns."""

    id: str
    source_id: str
    source: str
    table: str
    model: str
    accelerator: str
    n_accelerators: str
    tp: str
    pp: str
    ep: str
    dp: str
    precision_weights: str
    precision_kv: str
    precision_compute: str
    input_len: str
    output_len: str
    batch_or_concurrency: str
    metric: str
    value: str
    notes: str


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
    """A row without a prediction, and the reason."""

    line: ServingTableRow
    reason: str


COLUMNS = tuple(field.name for field in fields(ServingTableRow))


def read(path: Path) -> list[ServingCase | SkippedServingRow]:
    """Return every row of a table; a row with a cell that is not valid is skipped, with the first such cell.

    Raises InputError with every problem of the columns, and for rows of another width or with equal ids.
    """
    try:
        rows = [cells for _, cells in read_csv(path)]
    except (OSError, ValueError) as error:
        raise InputError(f"{path}: cannot be read: {reason(error)}") from None
    if not rows or not any(rows[0]):
        raise InputError(f"{path}: the file is empty; its first line names the columns")
    head, body = rows[0], [row for row in rows[1:] if row]
    problems = [
        f"{path}: column {name!r} is not known; {nearest(name, COLUMNS)}" for name in head if name not in COLUMNS
    ]
    problems += [f"{path}: column {name!r} is missing" for name in COLUMNS if name not in head]
    problems += [f"{path}: column {name!r} stands there twice" for name in COLUMNS if head.count(name) > 1]
    if problems:
        raise InputError(*problems)
    wrong_width = [(at, row) for at, row in enumerate(body, 2) if len(row) != len(head)]
    if wrong_width:
        raise InputError(
            *(f"{path}: row {at} has {len(row)} cells and the header {len(head)}" for at, row in wrong_width)
        )
    lines = [ServingTableRow(**dict(zip(head, (cell.strip() for cell in row), strict=True))) for row in body]
    problems = []
    seen: dict[str, int] = {}
    for at, line in enumerate(lines, 2):
        if line.id in seen:
            problems.append(f"{path}: row {at}: id={line.id!r} is that of row {seen[line.id]} too; ids are unique")
        seen.setdefault(line.id, at)
    if problems:
        raise InputError(*problems)
    return [_case(line) for line in lines]


_NEEDED = ("id", "source_id", "model", "accelerator", "metric", "value")
_WHOLE = ("n_accelerators", "tp", "pp", "ep", "dp", "input_len", "output_len", "batch_or_concurrency")


def _problems(line: ServingTableRow) -> Iterator[str]:
    for name in _NEEDED:
        if not getattr(line, name):
            yield f"{name} is empty, and has to be given"
    for name in _WHOLE:
        cell = getattr(line, name)
        if cell and not (re.fullmatch("[0-9]{1,9}", cell) and int(cell) > 0):
            yield f"{name}={_quoted(cell)}; valid: a whole number from 1 to 999,999,999"
    if line.value and not (re.fullmatch(r"[0-9]{1,12}(\.[0-9]{1,12})?", line.value) and float(line.value) > 0):
        yield f"value={_quoted(line.value)}; valid: a decimal above 0"


def _quoted(text: str) -> str:
    return repr(text if len(text) <= _LONGEST else text[: _LONGEST - 3] + "...")


def _case(line: ServingTableRow) -> ServingCase | SkippedServingRow:
    """Return the run that a row describes, or the reason why it cannot be priced."""
    if problems := [*_problems(line)]:
        return SkippedServingRow(line, "; ".join(problems))
    try:
        return _priced(line)
    except InputError as error:
        return SkippedServingRow(line, error.problems[0])


def _priced(line: ServingTableRow) -> ServingCase:
    for name, priced in {
        "precision_weights": FORMATS,
        "precision_kv": CACHE_BYTES,
        "precision_compute": FORMATS,
    }.items():
        if (cell := getattr(line, name)) and cell not in priced:
            raise InputError(f"{name} {cell!r} has no price; {', '.join(priced)} have")
    if line.metric not in METRICS:
        raise InputError(f"metric {line.metric!r} is not predicted; {nearest(line.metric, METRICS)}")
    model_name, model = named(line.model)
    chip = accelerator(line.accelerator)
    engine = _engine(line)
    if not line.input_len or not line.output_len:
        raise InputError("the lengths of prompts and answers are not stated")
    assumed: list[str] = []
    if engine is None:
        engine = UNNAMED
        assumed.append(f"no engine is named: one of today, of which {_KNOWN} are the known ones")
    degrees = _degrees(line, model, assumed)
    precision = line.precision_weights or line.precision_compute
    if not precision:
        precision = "bf16"
        assumed.append("weights and matmuls in bf16")
    if computed_in(precision, chip) is None:
        raise InputError(f"{chip.name} has no matmuls in {precision}")
    lengths, requests = (int(line.input_len), int(line.output_len)), int(line.batch_or_concurrency or 0)
    if CLIENT in line.notes:
        engine = server(engine, model_name, chip.name, degrees, lengths, requests)
        assumed.append("the server is started as the scripts of InferenceX do")
    return ServingCase(
        line=line, model=model, model_name=model_name, cluster=_cluster(chip.name, degrees.size), engine=engine,
        degrees=degrees, precision=precision, kv_precision=_kv_precision(line, engine, precision, assumed),
        input_len=lengths[0], output_len=lengths[1], requests=requests, regime=_regime(line, engine),
        shortest=0.8 if "0.8 to 1.0" in line.notes else 1.0, measured=float(line.value), assumed=tuple(assumed),
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
    pp, dp = int(line.pp or 1), int(line.dp or 1)
    n = int(line.n_accelerators or int(line.tp or 1) * pp * dp)
    tp = int(line.tp) if line.tp else n // (pp * dp)
    if not line.tp:
        assumed.append(f"tp {tp}, as many as there are accelerators")
    if tp * pp * dp != n:
        raise InputError(f"tp {tp} x pp {pp} x dp {dp} = {tp * pp * dp}, not n_accelerators={n}")
    ep = int(line.ep or 1)
    if (tp * dp) % ep or not experts_divide(model, ep):
        raise InputError(f"ep {ep} does not divide the {tp * dp} ranks and the experts of the model")
    if model.n_heads % tp:
        raise InputError(f"tp {tp} does not divide {model.n_heads} heads")
    return Degrees(tp, pp, dp, ep)


def _cluster(name: str, size: int) -> Cluster:
    """Return the smallest cluster of full nodes, or part of a node, that has room for an instance."""
    usual = cluster(f"{name}:1/1")
    node = min(size, _usual_node(name))
    return cluster(f"{name}:{-(-size // node) * node}/{node}") if size > 1 else usual


def _usual_node(name: str) -> int:
    from shardwright.cost.hardware import node_size

    return node_size(name)


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


def cases(rows: Iterable[ServingCase | SkippedServingRow]) -> list[ServingCase]:
    """Return the rows that can be priced."""
    return [row for row in rows if isinstance(row, ServingCase)]


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
