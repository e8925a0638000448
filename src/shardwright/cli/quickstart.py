"""shardwright quickstart: train a model from scratch, on text that every Python installation has on its disk."""

import os
import shutil
import sys
import sysconfig
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import typer

from shardwright.cli.common import AsJson, option, print_json, print_text, verb
from shardwright.config import RunConfig, load
from shardwright.runs.folder import CHECKPOINTS, CURVES, METRICS, PAGE
from shardwright.system.errors import DataError
from shardwright.system.files import new_folder
from shardwright.system.units import counted, format_bytes, format_count, format_seconds

CORPUS_BYTES = 10_000_000
STEPS = 340
PROMPT = "def read_file(path):\n"

RUN_FILE = """\
# Written by `shardwright quickstart`; change it and run it again with `shardwright train`.
out = "{out}"
steps = {steps}
device = "cpu"

[model]                     # a Llama of about 5M parameters
preset = "debug"
n_layers = 6
d_model = 256
d_ffn = 704
n_heads = 8
n_kv_heads = 4
head_dim = 32
vocab_size = {vocab_size}
max_seq_len = 256
tied_embedding = true
init_std = 0.05

[data]
path = "{data}"

[batch]
seq_len = 256
global_batch = 4
micro_batch = 2

[layout]                    # two ranks; gradients and optimizer states are sharded over them
dp_shard = 2
zero = 2

[optimizer]
lr = 3e-3

[lr_schedule]
warmup_steps = {warmup}

[checkpoint]
every = {quarter}

[metrics]
every = 10

[evaluation]
every = {quarter}
samples = 32
"""
VOCAB_SIZE = 512


@dataclass(frozen=True)
class QuickstartPaths:
    """The paths of the files and folders that quickstart makes."""

    corpus: Path
    data: Path
    run_file: Path
    run: Path


@verb
def quickstart(
    out: Path = option(Path("quickstart"), "folder for everything it makes; reused when it is there"),
    steps: int = option(STEPS, "optimizer steps", min=1),
    json: AsJson = False,
) -> None:
    """Train a small model on real text of this machine, and show its loss and a text that it writes.

    The text is the source of Python's standard library. Quickstart gathers it, trains a tokenizer on it, writes token
    shards, trains a Llama of about 5M parameters with two worker processes and ZeRO-2, evaluates it on the validation
    split, draws the curves and generates text. A second run reuses existing files; after an interruption it resumes.
    """
    places = QuickstartPaths(
        corpus=out / "corpus", data=out / "data", run_file=out / "quickstart.toml", run=out / "run"
    )
    say = (lambda text: None) if json else print_text
    began = time.monotonic()
    _gather(places.corpus, say)
    vocab_size = _tokenise(places, say)
    config = _write_run_file(places, steps, vocab_size)
    if not _train(config, places, say, quiet=json):
        say("              the same command continues from there")
        raise typer.Exit(os.EX_TEMPFAIL)
    answer = _show(places, say)
    if json:
        print_json(answer)
    else:
        _next_steps(answer, places, time.monotonic() - began)


def _gather(corpus: Path, say: Any) -> None:
    """Copy Python sources into `corpus`, completely or not at all."""
    if corpus.is_dir():
        say(f"1 corpus      {corpus} is there already")
        return
    n_files = n_bytes = 0
    with new_folder(corpus) as folder:
        for root in _sources():
            if n_bytes >= CORPUS_BYTES:
                break
            for path in sorted(root.rglob("*.py")):
                if not _wanted(path.relative_to(root)):
                    continue
                try:
                    text = path.read_text(encoding="utf-8")
                except (UnicodeDecodeError, OSError):
                    continue
                target = folder / root.name / path.relative_to(root)
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_text(text, encoding="utf-8")
                n_files, n_bytes = n_files + 1, n_bytes + len(text.encode())
        if n_bytes < CORPUS_BYTES:
            raise DataError(
                f"found only {format_bytes(n_bytes)} of Python source on this machine, and quickstart needs "
                f"{format_bytes(CORPUS_BYTES)}; prepare any text of your own with `shardwright data prepare SRC --out "
                f"DIR` and train on it with `shardwright train examples/debug.toml --set data.path=DIR`"
            )
    say(f"1 corpus      {counted(n_files, 'file')}, {format_bytes(n_bytes)} of Python source -> {corpus}")


def _sources() -> Iterator[Path]:
    """Yield folders of Python source: the standard library, and installed packages in case it is too small."""
    paths = sysconfig.get_paths()
    yield Path(paths["stdlib"])
    yield Path(paths["purelib"])


def _wanted(path: Path) -> bool:
    """Return whether a file is in neither an installed package nor the library's tests, which are repetitive."""
    return not {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"} & set(path.parts)


def _tokenise(places: QuickstartPaths, say: Any) -> int:
    """Make token shards of the corpus, if there are none, and return the size of their vocabulary."""
    from shardwright.data.prepare import prepare
    from shardwright.data.token_manifest import DataManifest

    if places.data.is_dir():
        manifest = DataManifest.read(places.data)
        say(f"2 tokens      {places.data} is there already")
    else:
        began = time.monotonic()
        manifest = prepare(places.corpus, places.data, vocab_size=VOCAB_SIZE, validation=0.05, glob="*.py")
        say(f"2 tokens      tokenizer trained, corpus encoded in {format_seconds(time.monotonic() - began)}")
    for name, split in manifest.splits.items():
        say(f"              {name}: {format_count(split.tokens)} tokens of {counted(split.documents, 'file')}")
    return manifest.vocab_size


def _write_run_file(places: QuickstartPaths, steps: int, vocab_size: int) -> RunConfig:
    text = RUN_FILE.format(
        out=places.run.name,  # next to the run file
        data=places.data.name,
        steps=steps,
        warmup=min(20, steps // 4),
        quarter=max(steps // 4, 1),
        vocab_size=vocab_size,
    )
    places.run_file.write_text(text, encoding="utf-8")
    return load(places.run_file, ['checkpoint.resume="auto"'])


def _train(config: RunConfig, places: QuickstartPaths, say: Any, quiet: bool) -> bool:
    """Train, and return whether all steps are done; they are not if a signal stopped the run."""
    from shardwright.training.checkpoint.store import CheckpointStore
    from shardwright.training.start import start

    store = CheckpointStore(places.run / CHECKPOINTS)
    if store.path_of(config.steps) in store.published():
        say(f"3 training    {places.run} is trained already; delete it to train again")
        return True
    say(f"3 training    as `shardwright train {places.run_file}` does")
    began = time.monotonic()
    start(config, quiet=quiet)
    say(f"              took {format_seconds(time.monotonic() - began)}")
    return store.path_of(config.steps) in store.published()


def _show(places: QuickstartPaths, say: Any) -> dict[str, Any]:
    """Draw the pictures of the run, print a sample, and return the results."""
    from shardwright.generation.generate import GenerationRequest, generate
    from shardwright.generation.sampling import Sampling
    from shardwright.report.curves import draw_curves
    from shardwright.report.run_record import read_run
    from shardwright.report.run_view import run_document
    from shardwright.training.start import summary
    from shardwright.view.html import write_page

    answer = summary(places.run)
    run = read_run(places.run)
    curves, page = places.run / CURVES, places.run / PAGE
    draw_curves(run, curves)
    write_page(run_document(run, {}), page)
    generated = generate(GenerationRequest(places.run, (PROMPT,), 60, Sampling(temperature=0.5, top_k=40)))
    assert generated is not None
    sample = PROMPT + generated.completions[0].text
    ratio = answer["validation_loss"] / answer["first_validation_loss"]
    say(
        f"4 result      validation loss {answer['first_validation_loss']:.2f} -> {answer['validation_loss']:.2f} "
        f"({ratio:.0%} of the first)"
    )
    say("5 it writes")
    say("\n".join("              | " + line for line in sample.splitlines()))
    return {**answer, "validation_ratio": ratio, "curves": str(curves), "report": str(page), "sample": sample}


def _next_steps(answer: dict[str, Any], places: QuickstartPaths, seconds: float) -> None:
    run_file, run = places.run_file, places.run
    rows = {
        "run file": run_file,
        "metrics": run / METRICS,
        "curves": answer["curves"],
        "report": answer["report"],
        "checkpoint": answer["checkpoint"],
        "tokens": places.data,
    }
    print_text(f"\nWhere everything is ({format_seconds(seconds)} in all)")
    for name, path in rows.items():
        print_text(f"  {name:<11} {path}")
    command = "shardwright" if shutil.which("shardwright") else sys.argv[0]
    print_text(
        f"""
What to try next
  {command} generate {run} --prompt "import os"
  {command} data inspect {places.data}
  {command} train {run_file} --set out=runs/zero3 --set layout.zero=3   # parameters sharded too
  {command} report {run}
  {command} train --keys                                     # every key of a run file
  {command} explore {run_file}   # other layouts, models and clusters in the browser"""
    )
