"""Write docs/run-file.md, the reference of the run file, from the schema in src/shardwright/config.

python docs/make_run_file.py
"""

from pathlib import Path

from pydantic import BaseModel

from shardwright.config import RunConfig
from shardwright.config.reference import RunFileKey, keys
from shardwright.model.presets import PRESETS
from shardwright.system.units import format_count

PAGE = Path(__file__).with_name("run-file.md")

HEAD = """\
# The run file: every key

This page is made from `src/shardwright/config`. Do not edit it; run `python docs/make_run_file.py`.
`shardwright train --keys` prints the same list in the terminal, and `shardwright train --keys --json` prints it for a
program.

A run file is TOML. A key that is not on this page is an error that names the nearest one that is, and all errors of a
file are reported at once. On the command line `--set KEY=VALUE` changes a key, for example `--set layout.dp_shard=2`.
The value is read as TOML; what is not TOML is taken as text, so `--set out=runs/b` needs no quotes.

Relative paths in a run file (`out`, `data.path`, `data.sources`, `init.weights`, `model.from`, `offload_path`,
`extensions`, and `resume`, `local` and `durable` of `[checkpoint]`) are relative to the folder of the run file, so the
file means the same from every working folder. For a symbolic link to a run file this is the folder of the link. Paths
in `--set` are relative to the working folder. The `run.toml` kept in a run and in its checkpoints has absolute paths.

The smallest complete run file:

```toml
out = "runs/first"
steps = 100

[data]
path = "data/python"

[batch]
seq_len = 128
global_batch = 16
```

A key without a default shows `-`. For the keys of `[model]` this means: the value of the preset. A key of a table in
`[model]` may be given alone where the preset has that table, as in `--set model.moe.top_k=4`; where it has not, those
without a default are all needed.
"""


def page() -> str:
    """The whole page."""
    every = list(keys())
    parts = [HEAD, "## At the top of the file\n", _table([key for key in every if "." not in key.path])]
    for name, field in RunConfig.model_fields.items():
        section = field.annotation
        if isinstance(section, type) and issubclass(section, BaseModel):
            parts += [f"## [{name}]\n", f"{section.__doc__}\n"]
            parts.append(_table([key for key in every if key.path.startswith(f"{name}.")]))
            if name == "model":
                parts.append(_presets())
    return "\n".join(parts)


def _table(rows: list[RunFileKey]) -> str:
    lines = ["| key | type | default | meaning |", "| --- | --- | --- | --- |"]
    for row in rows:
        lines.append(f"| `{row.path}` | {_cell(row.type)} | {row.default} | {_cell(row.description.rstrip('.'))} |")
    return "\n".join(lines) + "\n"


def _presets() -> str:
    lines = [
        "### Presets\n",
        "| preset | parameters | active | layers | d_model | heads | kv heads | d_ffn | experts | vocabulary | "
        "max_seq_len |",
        f"| --- |{' ---: |' * 10}",
    ]
    for name, s in PRESETS.items():
        counts = format_count(s.n_parameters), format_count(s.n_active_parameters)
        sizes = [f"{size:,}" for size in (s.n_layers, s.d_model, s.n_heads, s.n_kv_heads, s.d_ffn)]
        experts = "-" if s.moe is None else f"{s.moe.top_k} of {s.moe.n_experts}, {s.moe.d_ffn:,} wide"
        cells = (f"`{name}`", *counts, *sizes, experts, f"{s.vocab_size:,}", f"{s.max_seq_len:,}")
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _cell(text: str) -> str:
    """Plain text as a cell of a Markdown table."""
    return text.replace("|", "\\|")


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
    print(f"written to {PAGE}")
