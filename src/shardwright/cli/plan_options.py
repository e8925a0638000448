"""The options of `shardwright plan`, and the problems of options that do not describe the job."""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path

from shardwright.cli.common import AsJson, ConfigurationFiles, argument, flag, option, output_problems, size_problems
from shardwright.cost.formats import FORMATS
from shardwright.planner.operations import SAVES
from shardwright.system.errors import nearest
from shardwright.system.files import real_path

PRECISIONS = tuple(FORMATS)
WITH_MEASURED = (
    *("target", "cluster", "hardware", "link", "network"),
    *("document_tokens", "memory_margin", "measured", "html", "json"),
)
"""The options that are valid with --measured: they describe the run and the machine that it ran on."""


@dataclass(frozen=True, kw_only=True)
class FromOptions:
    """The options of verbs that read a configuration of another system."""

    from_: ConfigurationFiles = None
    model: str | None = option(None, "with --from, the model if no file has it; as for plan", "NAME|SIZES")
    cluster: str | None = option(None, "accelerators and how many, such as h100:64; as for plan", "NAME:COUNT")
    global_batch: int | None = option(None, "with --from, sequences of a step, over all ranks", "N")
    seq_len: int | None = option(None, "with --from, tokens of a sequence", "N")
    hardware: Path | None = option(None, "your accelerators, networks and clusters", "FILE.toml")

    def given(self, own: Sequence[str] = ()) -> list[str]:
        """Return the names of these options that are given, such as `--seq-len`. `own`: fields to leave out."""
        names = [field.name for field in fields(FromOptions) if field.name not in own]
        return [f"--{name.strip('_').replace('_', '-')}" for name in names if getattr(self, name) is not None]

    def plan_options(self) -> "PlanOptions":
        """Return the options of `plan` for the configuration."""
        return PlanOptions(**{field.name: getattr(self, field.name) for field in fields(FromOptions)})


@dataclass(frozen=True)
class PlanOptions:
    """Arguments and options of `plan`."""

    target: str | None = argument(
        None,
        "a run file, whose model, batch and precision are taken; or the word evaluate, to compare predictions "
        "with the measured runs of a table",
        "RUN.toml|evaluate",
    )
    runs: Path | None = argument(
        None, "evaluate only: a table of measured runs; if not given, the table that comes with shardwright", "RUNS.csv"
    )
    from_: ConfigurationFiles = None
    model: str | None = option(
        None,
        "a preset, such as llama-3.1-70b; config.json of transformers; or a few sizes, such as "
        "n_layers=32,d_model=4096,n_heads=32,d_ffn=11008,vocab_size=32000, and any other key of a run file's model "
        "section, such as n_kv_heads=8,moe.n_experts=8,moe.top_k=2,moe.d_ffn=4096",
        "NAME|SIZES",
    )
    cluster: str | None = option(
        None,
        "accelerators and how many, such as h100:64; h100:64/4@800Gb: 4 a node, 800 Gbit/s each to the others",
        "NAME:COUNT",
    )
    global_batch: int | None = option(None, "sequences of a step, over all ranks", "N")
    seq_len: int | None = option(None, "tokens of a sequence", "N")
    document_tokens: float | None = option(
        None,
        "attention within documents: the mean length of a token's document, sum L^2 / sum L over documents of "
        "L tokens, as `data inspect --seq-len` prints; from the data of a run file with data.attention='document' "
        "if not given",
        "N",
    )
    expert_load: str | None = option(
        None,
        "uneven loads of experts: their coefficient of variation, such as cv=0.3, or a file with tokens_by_expert",
        "cv=X|FILE.json",
    )
    precision: str | None = option(None, f"type of the matmuls: {', '.join(PRECISIONS)}; bf16 if not given", "NAME")
    lora: str | None = option(
        None,
        "train adapters instead of all weights, such as rank=16 or rank=8,targets=q+v; keys of a run file's "
        "section [lora], which it replaces",
        "rank=N[,KEY=VALUE]",
    )
    stack: str | None = option(
        None,
        "price another training software, such as megatron-core,date=2025-10,cuda_graphs=none; keys as the "
        "columns of docs/measured-runs.md: date, attention, cuda_graphs, gather_dtype, fused_loss, moe_dispatch",
        "NAME[,KEY=VALUE]",
    )
    link: str | None = option(None, "use the links inside a node of this accelerator, such as h100-pcie", "NAME")
    network: str | None = option(
        None, "another kind of network between nodes, at the same line rate, such as roce", "NAME"
    )
    compare: list[str] | None = option(
        None,
        "search on this cluster too, such as h200:64, or on the same one with link=NAME or network=NAME, and "
        "print a line for each; may be repeated",
        "CLUSTER",
    )
    hardware: Path | None = option(None, "your accelerators, networks and clusters", "FILE.toml")
    host_memory: str | None = option(
        None,
        "memory of each node's host, such as 2TB, which limits what layouts keep there; if not given, the "
        "value of the hardware file",
        "SIZE",
    )
    memory_margin: float = option(0.1, "share of the accelerator's memory to keep free", "X")
    top: int = option(10, "how many of the best layouts to list", "N")
    explain: str | None = option(
        None,
        "instead of searching, show every formula for this layout, such as "
        "tp=8,pp=4,micro_batch=1; keys of a run file's layout section; or for the layout of a run file",
        "LAYOUT|RUN.toml",
    )
    measured: Path | None = option(
        None,
        "instead of searching, compare the plan of the run file's layout with its run in this folder, term by term",
        "RUN_FOLDER",
    )
    fix: str | None = option(
        None, "search only layouts with these values, such as tp=8,pp=1; keys as for --explain", "KEYS"
    )
    prefer: str | None = option(
        None,
        "which layout is recommended: fastest; simplest, fewest axes at most 25 % slower; cheapest, fewest "
        "accelerator-hours on all accelerators or a part of them; if not given, of all layouts that tie "
        "with the fastest, one with headroom in memory and the fewest axes and settings",
        "fastest|simplest|cheapest",
    )
    budget_tokens: float | None = option(
        None, "tokens of the whole run, such as 15e12: adds days, interruptions, checkpoints, spare nodes and cost", "N"
    )
    batch_stages: str | None = option(
        None,
        "with --budget-tokens, a batch that changes over the run: the tokens that are done and the sequences "
        "of a step from there on, such as 0:3072,469e9:15360, or with tokens of a sequence, 0:3072x4096; if not "
        "given, from the run file's [[batch.stages]]",
        "TOKENS:BATCH,...",
    )
    price: list[str] | None = option(
        None,
        "with --budget-tokens, the price of an accelerator-hour, such as 2.5, or of one kind of accelerator, "
        "such as h200=3.5; may be repeated",
        "X|NAME=X",
    )
    operations: str | None = option(
        None,
        "with --budget-tokens, how the run is operated: failures (per 1,000 accelerator-days), detect_min, "
        f"restart_min, save ({', '.join(SAVES)}), save_every (steps), storage_gb_per_s (of a node), repair_hours, "
        "evaluate_every, evaluate_samples; from the run file, or defaults of docs/plan.md",
        "KEY=VALUE,...",
    )
    write: Path | None = option(None, "write the layout as a run file for train and verify", "FILE.toml")
    overwrite: bool = flag("with --write, replace a file that exists")
    html: Path | None = option(None, "write one page with pictures", "FILE.html")
    json: AsJson = False


def plan_option_problems(options: PlanOptions) -> list[str]:
    """Return the problems of the options that do not describe the job."""
    from shardwright.planner.search import margin_problems
    from shardwright.planner.simplicity import PREFERENCES

    target, write, html, budget_tokens = options.target, options.write, options.html, options.budget_tokens
    problems = margin_problems(options.memory_margin) + size_problems({"--top": options.top})
    if budget_tokens is not None and not 0 < budget_tokens < float("inf"):
        problems.append(f"--budget-tokens {budget_tokens:g}: a number of tokens above 0 is needed, such as 15e12")
    if options.prefer is not None and options.prefer not in PREFERENCES:
        problems.append(f"--prefer {options.prefer}: not a preference; {nearest(options.prefer, PREFERENCES)}")
    if options.explain is not None and options.prefer is not None:
        problems.append(
            "--prefer chooses the layout of a search that is recommended, and --explain searches nothing; leave one out"
        )
    if options.explain is not None and html is not None:
        problems.append("--html shows what a search finds, and --explain searches nothing; leave one out")
    if options.explain is not None and options.fix is not None:
        problems.append("--fix restricts the search, and --explain searches nothing; leave one out")
    alone = [f"--{name}" for name in ("explain", "write") if getattr(options, name) is not None]
    if options.compare and alone:
        others = " and ".join(alone).replace("_", "-")
        problems.append(f"--compare prints a line for each cluster; leave out {others}, or plan one cluster with them")
    if options.overwrite and write is None:
        problems.append("--overwrite goes with --write FILE.toml; give both, or leave it out")
    if write is not None and target is not None and real_path(write) == real_path(target):
        problems.append(f"--write {write}: that is the run file that is read; name another")
    elif write is not None and write.is_file() and not options.overwrite:
        problems.append(f"--write {write}: the file exists; name another, or add --overwrite to replace it")
    problems += output_problems("--write", write, ".toml")
    return problems + output_problems("--html", html, ".html")


def measured_option_problems(options: PlanOptions) -> list[str]:
    """Return the problems of the options given with --measured."""
    if options.measured is None:
        return []
    problems = []
    if options.target is None:
        problems.append(
            f"--measured {options.measured}: name the run file whose plan it is compared with, such as "
            f"{options.measured / 'run.toml'}"
        )
    given = [field.name for field in fields(options) if getattr(options, field.name) != field.default]
    if others := " and ".join(f"--{name.replace('_', '-')}" for name in given if name not in WITH_MEASURED):
        problems.append(f"--measured compares the unchanged run file with its run; leave out {others}")
    return problems
