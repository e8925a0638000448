"""The state of a page of the explorer: read from the query string of its address, and written back.

`pages/fields.toml` has the keys of the job, which are options of `plan` and keys of a run file. `model` names no file.
`chip`, `count`, `node_size` and `node_gbit` are the cluster, as `plan --cluster CHIP:COUNT/NODE_SIZE@NODE_GBIT`.
`micro_batch` and the keys of the layout are as for `plan --explain`; dp is the rest of the cluster if not given.
`pin` is the query string of the state that this state is compared with.

A key that is missing or empty has its default, so that a form without JavaScript may send every field.
"""

import tomllib
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from math import nan
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import parse_qsl, urlencode

from shardwright.cost.formats import FORMATS
from shardwright.cost.hardware import Cluster, cluster
from shardwright.cost.job import Job
from shardwright.cost.machine import on_machine
from shardwright.cost.stack import SHARDWRIGHT, SHARDWRIGHT_COMPILED
from shardwright.cost.step import estimate
from shardwright.layout.key import written
from shardwright.layout.keys import KEYS
from shardwright.layout.layout import Layout
from shardwright.model.by_sizes import spec_of_sizes
from shardwright.model.presets import resolve
from shardwright.model.spec import ModelSpec
from shardwright.optimizers import OPTIMIZERS
from shardwright.planner.choice import Choice, PricedLayout, micro_batch_problem, pairs
from shardwright.planner.search import MARGIN, limit_bytes
from shardwright.planner.whole_run import TrainingGoal, interruptions
from shardwright.system.errors import InputError, collecting, nearest


class FormField(NamedTuple):
    """A field of a form: its label and help, and its value if it is not given."""

    label: str
    help: str
    default: str = ""


PAGES = Path(__file__).parent / "pages"
_FIELDS = tomllib.loads((PAGES / "fields.toml").read_text(encoding="utf-8"))
JOB_FIELDS, SERVE_FIELDS = ({key: FormField(**row) for key, row in _FIELDS[page].items()} for page in ("plan", "serve"))
"""The fields of the forms by key, in the order of the form and of an address."""
JOB_DEFAULTS: Mapping[str, str] = {key: field.default for key, field in JOB_FIELDS.items()} | {
    "memory_margin": f"{MARGIN:g}"
}
CHOICES: Mapping[str, Sequence[str]] = {
    "precision": tuple(FORMATS),
    "optimizer": tuple(OPTIMIZERS),
    "state_dtype": ("fp32", "bf16"),
    "compile": ("false", "true"),
}
"""The values of keys of the job that have no others."""
LAYOUT_KEYS = (*KEYS, "micro_batch")
PIN = "pin"
MOST_KEYS = 100
LONGEST = 400
"""Most characters of a value that a message repeats, and of any value except `model` and `pin`."""
LONGEST_MODEL = 8000
"""Most characters of `model` and of `pin`."""
MOST_COUNT = 2**31
MOST_ACTIONS = 2**17
MOST_STAGES = 256
MOST_MODEL_LAYERS = 1024
"""Limits of an answer: passes of all ranks in a step, ranks of pp, and layers, whose cost a page computes at once."""


@dataclass(frozen=True)
class PageState:
    """A page whose layout can be priced. `model`: the name or the sizes; `job`: the planner's job; `choice`: layout and
    micro-batch; `margin`: share of the memory that is kept free; `goal`: the whole run, if its tokens were given;
    `pinned`: the state that this one is compared with."""

    model: str
    job: Job
    choice: Choice
    margin: float = MARGIN
    goal: TrainingGoal | None = None
    pinned: "PageState | None" = None

    @property
    def layout(self) -> Layout:
        """Return the layout of the choice."""
        return self.choice.layout

    @cached_property
    def priced(self) -> PricedLayout:
        """Return the layout with its cost."""
        return PricedLayout.from_choice(self.job, self.choice)

    @property
    def limit_bytes(self) -> float:
        """Return the bytes that a rank may use of its device."""
        return limit_bytes(self.job, self.margin)


@dataclass(frozen=True)
class ParsedState:
    """The result of reading a query string. `values`: the text of each given key, for the form; `job`: None if there
    are problems of other keys than the layout's; `state`: None if there are `problems`, each a sentence for people."""

    values: Mapping[str, str]
    job: Job | None
    state: PageState | None
    problems: Sequence[str]

    def value(self, key: str) -> str:
        """Return the text of a key of the job, or its default."""
        return self.values.get(key) or JOB_DEFAULTS.get(key, "")


def parse(query: str, hardware: Path | None = None) -> ParsedState:
    """Read a query string. `hardware`: a file of `shardwright measure`, whose clusters may be named.

    Never raises an error for the text: every problem is in the result.
    """
    problems: list[str] = []
    values = read_query(query, (*JOB_DEFAULTS, *LAYOUT_KEYS, PIN), problems)
    pin = values.pop(PIN, "")
    job = goal = choice = None
    margin = _number(values, "memory_margin", problems, low=0.0, below=1.0)
    with collecting(problems):
        job = _job(values, hardware)
        goal = _goal(values, job, problems)
    valid_job = None if problems else job
    if job is not None:
        with collecting(problems):
            choice = _choice(values, job)
            check(job, choice)
    pinned = None
    if pin:
        pinned = parse(urlencode([pair for pair in parse_qsl(pin) if pair[0] != PIN]), hardware).state
        if pinned is None:
            problems.append("pin: the pinned layout cannot be read; pin another one, or leave it out")
    given = values | ({PIN: pin} if pin else {})
    if problems or job is None or choice is None:
        return ParsedState(given, valid_job, None, list(dict.fromkeys(problems)))
    name = values.get("model") or JOB_DEFAULTS["model"]
    return ParsedState(given, job, PageState(name, job, choice, margin, goal, pinned), [])


def query_of(state: PageState, pinned: bool = True) -> str:
    """Return the shortest query string that `parse` reads as this state. `pinned`: with the state it is compared
    with."""
    job = state.job
    name, changes = cluster_words(job)
    named, _, rest = name.replace(" ", "").rpartition(":")
    count, _, node_gbit = rest.lower().partition("@")
    count, _, node_size = count.partition("/")
    goal = state.goal
    values = {
        "model": state.model,
        "chip": named,
        "count": count,
        "node_size": node_size,
        "node_gbit": node_gbit.partition("g")[0],
        "network": changes.get("network", ""),
        "host_memory": changes.get("host_memory", ""),
        "global_batch": str(job.global_batch),
        "seq_len": str(job.seq_len),
        "document_tokens": "" if job.document_tokens is None else repr(float(job.document_tokens)),
        "precision": job.precision,
        "optimizer": job.optimizer,
        "state_dtype": "bf16" if job.narrow_states else "fp32",
        "compile": written(job.compiled),
        "memory_margin": repr(state.margin),
        "budget_tokens": "" if goal is None else repr(goal.tokens),
        "price": "" if goal is None or not goal.prices else repr(goal.prices[""]),
    }
    keys = [(key, text) for key, text in values.items() if key in ("model", "chip", "count") or _differs(key, text)]
    keys += [(key, written(value)) for key, value in written_layout(job, state.choice).items()]
    if pinned and state.pinned is not None:
        keys.append((PIN, query_of(state.pinned, pinned=False)))
    return urlencode(keys)


def cluster_words(job: Job) -> tuple[str, dict[str, str]]:
    """Return the name of the cluster of a job and its changes, such as the network, from the name that `_cluster`
    writes."""
    name, *changes = job.cluster.name.split(", ")
    return name, dict(change.split("=", 1) for change in changes)


def layout_value(key: str, text: str) -> dict[str, Any]:
    """Return a key of the layout with its value. Raises InputError for a text that is no value of the key."""
    values, problems = pairs(f"{key}={text}", "layout:")
    if problems:
        raise InputError(*(problem.removeprefix("layout: ") for problem in problems))
    return values


def written_layout(job: Job, choice: Choice) -> dict[str, Any]:
    """Return the values of the layout to write into an address: without keys that have the same value if they are not
    given."""
    settings = choice.settings()
    for name in ("micro_batch", "zero", "dp_shard", "dp_replicate"):
        rest = {key: value for key, value in settings.items() if key != name}
        with suppress(InputError):
            if _choice_of(rest, job) == choice:
                settings = rest
    return {name: settings[name] for name in LAYOUT_KEYS if name in settings}


def _choice_of(given: dict[str, Any], job: Job) -> Choice:
    """Return the choice with these keys. Raises InputError for a layout that breaks a rule."""
    keys = {key: value for key, value in given.items() if key != "micro_batch"}
    return Choice(Layout(**_with_data(keys, job.cluster.size)), given.get("micro_batch", 1))


def _differs(key: str, text: str) -> bool:
    default = JOB_DEFAULTS[key]
    return float(text) != float(default) if key == "memory_margin" else text != default


def read_query(query: str, known: Sequence[str], problems: list[str]) -> dict[str, str]:
    """Return the given texts by key, without empty ones. Adds unknown and repeated keys to `problems`."""
    try:
        given = parse_qsl(query, max_num_fields=MOST_KEYS, encoding="utf-8", errors="replace")
    except ValueError:
        problems.append(f"the address has more than {MOST_KEYS} keys; leave some out")
        return {}
    values: dict[str, str] = {}
    for key, text in given:
        text = text.strip()
        if key not in known:
            problems.append(f"{key[:LONGEST]}: there is no such key; {nearest(key[:LONGEST], known)}")
        elif key in values:
            problems.append(f"{key}={text[:LONGEST]}: given twice, and {values[key][:LONGEST]} before; leave one out")
        elif len(text) > (most := longest(key)):
            problems.append(f"{key}: at most {most:,} characters are possible")
        elif text:
            values[key] = text
    return values


def longest(key: str) -> int:
    """Return the most characters of a value."""
    return LONGEST_MODEL if key in ("model", PIN) else LONGEST


def _job(values: Mapping[str, str], hardware: Path | None) -> Job:
    text = {key: values.get(key) or default for key, default in JOB_DEFAULTS.items()}
    problems: list[str] = []
    seq_len = _whole(text, "seq_len", problems)
    global_batch = _whole(text, "global_batch", problems)
    document_tokens = _document_tokens(text, seq_len, problems)
    model = machine = None
    try:
        model = _model(text["model"], seq_len)
    except InputError as error:
        problems += [problem.replace("--model", "model") for problem in error.problems]
    with collecting(problems):
        machine = _cluster(text, hardware)
    for key, choices in CHOICES.items():
        if text[key] not in choices:
            problems.append(f"{key}={text[key]}: not one of the choices; {nearest(text[key], choices)}")
    if machine is not None and text["precision"] in FORMATS:
        problem = machine.accelerator.peak_problem(FORMATS[text["precision"]].peak)
        problems += [] if problem is None else [f"precision={text['precision']}: {problem}"]
    if problems or model is None or machine is None:
        raise InputError(*problems)
    job = Job(
        model=model,
        cluster=machine,
        seq_len=seq_len,
        global_batch=global_batch,
        precision=text["precision"],
        optimizer=text["optimizer"],
        narrow_states=text["state_dtype"] == "bf16",
        document_tokens=document_tokens,
        stack=SHARDWRIGHT_COMPILED if text["compile"] == "true" else SHARDWRIGHT,
    )
    if job.narrow_states and (narrow := [*job.optimizer_kind.narrow_problems(job.options_of_optimizer)]):
        raise InputError(*narrow)
    return on_machine(job)


@lru_cache(maxsize=64)
def _model(text: str, seq_len: int) -> ModelSpec:
    return spec_of_sizes(text, max(1, seq_len)) if "=" in text else resolve(text)


def _cluster(text: Mapping[str, str], hardware: Path | None) -> Cluster:
    """Return the cluster, named after its changes as `plan` names it."""
    size = f"/{text['node_size']}" * bool(text["node_size"])
    gbit = f"@{text['node_gbit']}Gb" * bool(text["node_gbit"])
    result = cluster(f"{text['chip']}:{text['count']}{size}{gbit}", hardware)
    changes = []
    if text["network"]:
        result = result.on(text["network"], hardware)
        changes.append(f"network={text['network']}")
    if text["host_memory"]:
        try:
            result = result.with_host_memory(text["host_memory"])
        except InputError as error:
            raise InputError(f"host_memory={text['host_memory']}: {error}") from None
        changes.append(f"host_memory={text['host_memory']}")
    return replace(result, name=", ".join([result.name, *changes]))


def _goal(values: Mapping[str, str], job: Job, problems: list[str]) -> TrainingGoal | None:
    if not values.get("budget_tokens"):
        if values.get("price"):
            problems.append("price goes with budget_tokens, the tokens of the whole run, such as 15e12")
        return None
    tokens = _number(values, "budget_tokens", problems, low=1.0, below=1e18)
    price = _number(values, "price", problems, low=1e-9, below=1e9) if values.get("price") else None
    goal = TrainingGoal(tokens, {} if price is None else {"": price})
    interruptions(job, goal.operations)
    return goal


def _choice(values: Mapping[str, str], job: Job) -> Choice:
    given: dict[str, Any] = {}
    problems: list[str] = []
    for key in LAYOUT_KEYS:
        if not (text := values.get(key)):
            continue
        if "," in text:
            problems.append(f"{key}={text}: one value is needed, without a comma")
            continue
        with collecting(problems):
            given |= layout_value(key, text)
    if "micro_batch" in given and (rule := micro_batch_problem(given["micro_batch"])):
        problems.append(f"micro_batch={given['micro_batch']}: {rule}")
    if problems:
        raise InputError(*problems)
    return _choice_of(given, job)


def _with_data(given: dict[str, Any], size: int) -> dict[str, Any]:
    """Return the keys of a layout with the degrees of dp that were not given: dp_shard, or dp_replicate with zero 0,
    takes the rest of the accelerators."""
    others = 1
    for axis in ("tp", "pp", "cp", "dp_replicate", "dp_shard"):
        others *= max(1, given.get(axis, 1))
    rest = "dp_replicate" if given.get("zero") == 0 else "dp_shard"
    return given if rest in given or size % others else given | {rest: size // others}


def check(job: Job, choice: Choice) -> None:
    """Raise InputError with every reason why the layout cannot be priced, or not within a second."""
    layout = choice.layout
    large = []
    if layout.pp > MOST_STAGES:
        large.append(f"pp={layout.pp}: this page prices at most {MOST_STAGES} ranks of pp")
    if job.model.n_layers > MOST_MODEL_LAYERS:
        large.append(f"n_layers={job.model.n_layers}: this page prices models of at most {MOST_MODEL_LAYERS} layers")
    if layout.pp > 1 and layout.kind.searched:
        large.append(f"pp_schedule={layout.pp_schedule}: its search takes seconds, and this page answers at once")
    if large:
        raise InputError(*(f"{problem}; shardwright plan --explain has no such limit" for problem in large))
    estimate(job, layout, choice.micro_batch)
    n_microbatches = job.global_batch // (choice.micro_batch * layout.data_ranks)
    actions = 2 * layout.pp * layout.virtual_stages * n_microbatches
    if layout.pp > 1 and actions > MOST_ACTIONS:
        raise InputError(
            f"the schedule has {actions:,} passes in a step, and this page simulates at most {MOST_ACTIONS:,}; use a "
            f"smaller global_batch or a larger micro_batch, or shardwright plan --explain"
        )


def _whole(values: Mapping[str, str], key: str, problems: list[str]) -> int:
    text = values[key]
    if not (text.isascii() and text.isdecimal() and len(text) <= 18 and 1 <= int(text) <= MOST_COUNT):
        problems.append(f"{key}={text}: a whole number from 1 to {MOST_COUNT:,} is needed")
        return 1
    return int(text)


def _document_tokens(values: Mapping[str, str], seq_len: int, problems: list[str]) -> float | None:
    if not values["document_tokens"]:
        return None
    tokens = _float(values["document_tokens"])
    if not 1 <= tokens <= seq_len and not problems:
        problems.append(
            f"document_tokens={values['document_tokens']}: a number from 1 to the seq_len={seq_len}, which cuts longer "
            f"documents, is needed"
        )
    return tokens


def _number(values: Mapping[str, str], key: str, problems: list[str], low: float, below: float) -> float:
    text = values.get(key) or JOB_DEFAULTS[key]
    number = _float(text)
    if not low <= number < below:
        problems.append(f"{key}={text}: a number from {low:g} to below {below:g} is needed")
        return low
    return number


def _float(text: str) -> float:
    """Return the number of a text, nan if it is none."""
    try:
        return float(text)
    except ValueError:
        return nan
