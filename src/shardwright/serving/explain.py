"""The ledger of one layout with one batch: every formula behind its times and its memory."""

from shardwright.cost import ledger
from shardwright.cost.ledger import LedgerEntry
from shardwright.serving import forms
from shardwright.serving.memory import largest_batch
from shardwright.serving.search import ServingTask
from shardwright.serving.setting import Degrees, Settings


def explain(task: ServingTask, degrees: Degrees, batch: int) -> list[LedgerEntry]:
    """Return the entries of memory, of a pass with a token of each request, and of a pass that also reads a prompt."""
    serving, settings = task.serving, Settings.from_layouts([degrees])
    context = forms.middle(task.input_len, task.output_len)
    with ledger.record() as memory_entries:
        largest_batch(serving, settings, task.length, task.engine)
    with ledger.record() as decode_entries:
        token_s = forms.decode_s(serving, settings, float(batch), context)
        ledger.note("a token of each request", "", token_s, "s", "", "a pass that decodes")
    with ledger.record() as prompt_entries:
        longer = forms.prompt_in_passing_s(serving, settings, float(batch), context, task.input_len)
        ledger.note("longer for a prompt", "", longer, "s", "", "a pass that reads a prompt too")
    return [
        *_under("", memory_entries),
        *_under("decode: ", decode_entries),
        *_under("with a prompt: ", [entry for entry in prompt_entries if entry not in decode_entries]),
    ]


def _under(prefix: str, entries: list[LedgerEntry]) -> list[LedgerEntry]:
    """Return the entries with a prefix on the names of their sections."""
    sections = list(dict.fromkeys(entry.section for entry in entries))
    ordered = sorted(entries, key=lambda entry: sections.index(entry.section))
    return [
        LedgerEntry(f"{prefix}{entry.section or 'memory of a rank'}", *(getattr(entry, name) for name in _REST))
        for entry in ordered
    ]


_REST = ("what", "formula", "inputs", "value", "unit", "source")
