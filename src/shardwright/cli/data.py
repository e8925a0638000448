"""`shardwright data`: make token shards from text, and inspect them."""

import time
from dataclasses import dataclass
from inspect import signature
from pathlib import Path
from typing import Any, Literal

import typer
from rich.markup import escape
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from shardwright.cli.common import AsJson, argument, console, error_console, flag, option, print_json, print_text, verb
from shardwright.data.inspect import inspect as inspect_folder
from shardwright.data.prepare import PrepareProgress
from shardwright.data.prepare import prepare as prepare_folder
from shardwright.data.readers import EncodingErrors
from shardwright.data.shards import verify_checksums
from shardwright.data.token_manifest import DataManifest
from shardwright.system.errors import InputError
from shardwright.system.remote import REMOTE
from shardwright.system.units import counted, format_bytes, format_count, format_seconds, percent

app = typer.Typer(
    help="Turn text into token shards for training, and show their contents.",
    no_args_is_help=True,
    rich_markup_mode="markdown",
)
PLAIN_LINE_EVERY_S = 5.0
STAGES = {"tokenizer": "training a tokenizer", "tokens": "writing tokens", "room": "waiting for room"}
USUAL = {name: parameter.default for name, parameter in signature(prepare_folder).parameters.items()}


@dataclass(frozen=True)
class PrepareOptions:
    """Arguments and options of `prepare`, with the names of the parameters of `data.prepare.prepare`."""

    source: str = argument(
        ...,
        "a file or folder of text, source code, JSON records or Parquet, on disk or at a URL of fsspec "
        "such as s3://BUCKET/FOLDER; or hf:NAME[:CONFIG][:SPLIT], a dataset of the Hugging Face hub (or its local "
        "folder)",
        "SRC",
    )
    out: Path = option(..., "the folder to make; without --publish it appears only when it is complete")
    tokenizer: Path | None = option(None, "a tokenizer.json to use; without it a byte-level BPE is trained on the text")
    separator: str | None = option(
        None, "the token of --tokenizer that ends a document; `<|endoftext|>`, `</s>`, ... are found"
    )
    vocab_size: int = option(USUAL["vocab_size"], "tokens of a tokenizer trained here")
    tokenizer_sample: int = option(USUAL["tokenizer_sample"], "bytes of text that a tokenizer is trained on, at most")
    validation: float = option(
        USUAL["validation"], "fraction of the documents that go to the split `validation`; 0 for none"
    )
    seed: int = option(USUAL["seed"], "chooses the documents of the split `validation`")
    shard_tokens: int = option(USUAL["shard_tokens"], "tokens of one shard file")
    max_tokens: int | None = option(
        USUAL["max_tokens"], "end with the document that reaches this number of tokens; none: read all of SRC"
    )
    format: Literal["text", "chat", "preference"] = option(
        USUAL["format"],
        "chat: records have `messages`, or `prompt` and `completion`; only the answers are trained on. "
        "preference: records have a `chosen` and a `rejected` answer, for [preference] of a run file.",
    )
    chat_template: Path | None = option(
        None, "a Jinja file that writes `messages` as text, instead of the tokenizer's own template"
    )
    text_key: str = option(USUAL["text_key"], "the field (JSONL) or column (Parquet, hf:) that holds the text")
    glob: str | None = option(None, "of a folder only the files that match, for example '*.py'")
    encoding_errors: EncodingErrors = option(
        USUAL["encoding_errors"], "bytes that are not UTF-8: stop, replace them by U+FFFD, or skip the document"
    )
    skip_bad: bool = flag("leave out records that are not JSON or have no text, and report their number")
    overwrite: bool = flag("replace OUT, once the new one is complete")
    publish: bool = flag(
        "add complete shards to OUT while others are written, for runs with data.order='shards'; the same "
        "command continues after an interruption"
    )
    keep_gib: float | None = option(
        USUAL["keep_gib"],
        "with --publish: GiB of the disk that the tokens in OUT may occupy; shards that a run has trained on "
        "are deleted, the oldest first, and prepare waits while there is none; none: all are kept",
    )
    json: AsJson = False


@app.command()
@verb
def prepare(options: PrepareOptions) -> None:
    """Tokenise a corpus into shards that training reads by memory map.

    Every document is followed by one separator token; a fraction of the documents goes to the validation split.
    All cores are used, and memory does not grow with the corpus. Interrupted, it leaves no OUT, except with --publish.

    Example: `shardwright data prepare ~/books --glob '*.txt' --out data/books --vocab-size 16384`
    """
    given = {name: value for name, value in vars(options).items() if name != "json"}
    out, began_s = options.out, time.monotonic()
    with _Display(silent=options.json) as display:
        manifest = prepare_folder(**given, progress=display.tell)
    if options.json:
        print_json({"out": str(out), **manifest.model_dump(mode="json"), "fingerprint": manifest.fingerprint})
    else:
        _print_summary(out, manifest, time.monotonic() - began_s)


@app.command()
@verb
def inspect(
    directory: str = argument(..., "a folder that `data prepare` made, here or at a URL of fsspec", "DIR"),
    split: str = option("train", "the split whose documents are shown"),
    documents: int = option(3, "how many documents or samples to show, decoded"),
    seq_len: int | None = option(
        None,
        "show packed samples of N tokens, as training reads them, not documents; and what "
        "data.attention='document' does in them: the share of the scores that is left, the balance of the ranks "
        "of cp",
        "N",
    ),
    verify: bool = flag("read every file and compare its checksum; exit code 1 if damaged"),
    json: AsJson = False,
) -> None:
    """Show the contents of a folder of tokens: splits, shards, tokenizer, and the first documents decoded.

    In conversations the trained tokens are green, or between ⟦ and ⟧ without colour.

    Example: `shardwright data inspect data/books --split validation --documents 1 --verify`
    """
    if verify and REMOTE in directory:
        raise InputError(f"{directory}: --verify reads files of this machine; copy the folder, or leave --verify out")
    damage = verify_checksums(directory) if verify else []
    if damage:
        if json:
            print_json({"folder": str(directory), "damage": damage})
        else:
            for problem in damage:
                error_console.print(f"[bold red]damaged:[/] {escape(f'{directory}: {problem}')}")
        raise typer.Exit(1)
    answer = inspect_folder(directory, split, documents, seq_len)
    if json:
        print_json(answer | ({"damage": damage} if verify else {}))
        return
    _print_folder(answer)
    if verify:
        console.print("All checksums are right.")


class _Display(Progress):
    """A progress bar on a terminal; otherwise a line every few seconds, or nothing if `silent`."""

    def __init__(self, *, silent: bool) -> None:
        columns = TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[amount]}")
        hidden = silent or not console.is_terminal
        super().__init__(*columns, TimeElapsedColumn(), TimeRemainingColumn(), console=console, disable=hidden)
        self._lines = hidden and not silent
        self._line_s = time.monotonic()
        self._tasks_of: dict[str, TaskID] = {}

    def tell(self, now: PrepareProgress) -> None:
        """Show the progress of `prepare`."""
        amount = format_bytes(now.read_bytes)
        if now.total_bytes is not None:
            amount += f" of {format_bytes(now.total_bytes)}"
        if now.tokens:
            amount += f", {format_count(now.tokens)} tokens"
        stage = STAGES[now.stage]
        if stage not in self._tasks_of:
            self._tasks_of[stage] = self.add_task(stage, total=now.total_bytes, amount=amount)
        self.update(self._tasks_of[stage], completed=now.read_bytes, amount=amount)
        if self._lines and time.monotonic() - self._line_s >= PLAIN_LINE_EVERY_S:
            self._line_s = time.monotonic()
            print_text(f"{stage}: {amount}")


def _print_summary(out: Path, manifest: DataManifest, elapsed_s: float) -> None:
    for name, split in manifest.splits.items():
        console.print(
            f"{name}: {format_count(split.tokens)} tokens, {_documents(split.documents)}, "
            f"{counted(len(split.shards), 'shard')}"
        )
    if "validation" in manifest.splits and not manifest.splits["validation"].documents:
        console.print(
            "[yellow]note:[/] the source is one document, so there is no validation split; "
            "split it into files or JSONL lines to have a validation split"
        )
    elif note := _validation_note(manifest):
        console.print(f"[yellow]note:[/] {note}", soft_wrap=True)
    if skipped := manifest.source["skipped"]:
        console.print(f"[yellow]note:[/] documents left out because they are not UTF-8 text: {skipped}")
    if bad := manifest.source["bad"]:
        console.print(f"[yellow]note:[/] records left out because they are not JSON or have no text: {bad}")
    if skipped or bad:
        console.print("the first that were left out:")
        for reason in manifest.source["skipped_first"][:3]:
            console.print(f"  {escape(reason)}", soft_wrap=True)
    if structured := manifest.source.get("structured"):
        console.print(
            f"[yellow]note:[/] {counted(structured, 'file')} of JSON or tables without records that can "
            f"be read; each of them is one document, with brackets and commas; the first: "
            f"{escape(manifest.source['structured_first'])}; convert records to JSON lines, one object a line",
            soft_wrap=True,
        )
    if unread := manifest.source.get("unread"):
        console.print(f"[yellow]note:[/] fields that are not read: {escape(', '.join(unread))}", soft_wrap=True)
    for marker, n_tokens in manifest.source.get("plain_markers", {}).items():
        console.print(
            f"[yellow]warning:[/] {escape(marker)} of the chat template is no token of the tokenizer, and becomes "
            f"{counted(n_tokens, 'token')} of text; take the tokenizer that belongs to the template, or add "
            "the token to it",
            soft_wrap=True,
        )
    if replaced := manifest.source["replaced"]:
        console.print(
            f"[yellow]note:[/] bytes that are not UTF-8 were replaced by U+FFFD in {counted(replaced, 'place')}"
        )
    read_bytes = manifest.source["read_bytes"]
    console.print(
        f"{escape(str(out))}: vocabulary of {manifest.vocab_size}, read {format_bytes(read_bytes)} "
        f"in {format_seconds(elapsed_s)} ({format_bytes(read_bytes / elapsed_s)}/s)",
        soft_wrap=True,
    )


def _documents(n: int) -> str:
    return counted(n, "document") if n < 1000 else f"{format_count(n)} documents"


def _validation_note(manifest: DataManifest) -> str:
    """Return a remark if the validation split is more than twice or less than half of the requested size."""
    requested, splits = manifest.options["validation"], manifest.splits
    n_documents = sum(split.documents for split in splits.values())
    if not requested or requested / 2 <= (share := splits["validation"].documents / n_documents) <= 2 * requested:
        return ""
    return (
        f"the validation split holds {splits['validation'].documents:,} of {counted(n_documents, 'document')} "
        f"({percent(share)}), and --validation asks for {percent(requested)}; it takes whole documents, at least one"
    )


def _print_packing(packing: dict[str, Any]) -> None:
    console.print(
        f"packed to {counted(packing['sequences'], 'sequence')} of {packing['seq_len']:,} tokens: "
        f"{packing['documents_a_sequence']:.1f} documents a sequence; sum L^2 / sum L = "
        f"{packing['attended_tokens']:,.0f} tokens, so attention within documents has "
        f"{percent(packing['scores_share'])} of the scores",
        soft_wrap=True,
    )
    console.print("scores of the rank of cp that has the most, over the mean of all:")
    table = Table("cp", "tokens")
    for heading in ("all", "by step", "worst sequence", "keys sent"):
        table.add_column(heading, justify="right")
    for ring in packing["rings"]:
        for name, what in (("zigzag", "zig-zag"), ("dealt", "dealt")):
            ratios = ring[name]
            numbers = [f"{ratios[key]:.3f}" for key in ("sum", "steps", "worst")]
            table.add_row(str(ring["cp"]), what, *numbers, percent(ratios["sent"]))
    console.print(table)


def _print_folder(answer: dict[str, Any]) -> None:
    tokenizer = answer["tokenizer"]
    console.print(
        f"{escape(answer['folder'])}: by {answer['created_by']}, "
        f"from {escape(str(answer['source']['source']))}; "
        f"vocabulary of {tokenizer['vocab_size']}, separator {escape(tokenizer['separator'])} "
        f"(id {tokenizer['separator_id']}), {answer['dtype']}",
        soft_wrap=True,
    )
    table = Table("split", "shard")
    for heading in ("tokens", "documents", "size"):
        table.add_column(heading, justify="right")
    for name, split in answer["splits"].items():
        for shard in split["shards"]:
            table.add_row(
                name,
                shard["file"],
                f"{shard['tokens']:,}",
                f"{shard['documents']:,}",
                format_bytes(shard["bytes"]),
            )
        table.add_row(f"[bold]{name}[/]", "all", f"{split['tokens']:,}", f"{split['documents']:,}", "")
        table.add_section()
    console.print(table)
    if lengths := answer["document_tokens"]:
        console.print(
            f"tokens of a {answer['split']} document: " + ", ".join(f"{k} {v:,.0f}" for k, v in lengths.items())
        )
    if packing := answer["packing"]:
        _print_packing(packing)
    for document in answer["documents"]:
        trained = f", {document['trained_tokens']:,} trained on" if "segments" in document else ""
        size = counted(document["tokens"], "token")
        title = f"{answer['split']} {answer['shown']} {document['document']}: {size}{trained}"
        console.rule(title, align="left")
        console.print(_text_of(document), soft_wrap=True)


def _text_of(document: dict[str, Any]) -> Text:
    """Return the text of a document with trained tokens in green or, without colour, between marks."""
    coloured = console.color_system is not None and not console.no_color
    text = Text()
    for segment in document.get("segments") or [{"text": document["text"], "trained": False}]:
        marks = ("⟦", "⟧") if segment["trained"] and not coloured else ("", "")
        text.append(segment["text"].join(marks), style="green" if segment["trained"] else "")
    return text.append(" ..." if document["shortened"] else "")
