"""Write the pages docs/coming-from-*.md: a worked example, and each option of another system with its counterpart.

python docs/make_coming_from.py
"""

import re
import shlex
import subprocess
import sys
from pathlib import Path
from textwrap import fill

from shardwright.readers.hugging_face import HUGGING_FACE
from shardwright.readers.megatron import MEGATRON_LM
from shardwright.readers.table import NO_COUNTERPART, NO_EFFECT, READ, ForeignOption, System
from shardwright.readers.torchtitan import TORCHTITAN

FOLDER = Path(__file__).parent
EXAMPLES = "examples/other-systems"
MOST_LINES = 200
PAGES: dict[str, tuple[str, System, str, str]] = {
    "coming-from-megatron-lm": (
        "Megatron-LM",
        MEGATRON_LM,
        f"plan --from {EXAMPLES}/megatron_llama3_8b.sh --cluster h100:16",
        "A shell script with the usual variables, or a file with the arguments alone. The script is parsed: "
        "assignments, arrays, `${NAME}` and `${NAME:-default}`, arithmetic, `if` and `case` with known "
        "conditions, `eval` of a known text, and sourced files next to the script. Loops, functions and the output of "
        "programs are not evaluated; an option whose value depends on them is refused with its line.",
    ),
    "coming-from-torchtitan": (
        "torchtitan",
        TORCHTITAN,
        f"plan --from {EXAMPLES}/torchtitan_llama3_70b.toml --cluster h100:64",
        "A TOML file, or a Python configuration of plain assignments and returned calls: `--from config_registry.py` "
        "with one function, `--from config_registry.py:llama3_70b` with several. Python is parsed and not executed. "
        "torchrun sets the number of ranks, so `--cluster` gives it. A flavor whose sizes are not known here needs "
        "`--model config.json`.",
    ),
    "coming-from-deepspeed": (
        "DeepSpeed",
        HUGGING_FACE,
        f"plan --from {EXAMPLES}/deepspeed_zero3.json --from {EXAMPLES}/training_arguments.json --model llama-3.1-8b "
        "--cluster h100:16",
        "DeepSpeed's JSON. It has neither the model nor the number of ranks: `--model` names the model's config.json "
        "or a preset, `--cluster` the accelerators, and `--seq-len` the length of sequences. `auto` is taken "
        "from the JSON of TrainingArguments, a second `--from`; without that, the error names the line.",
    ),
    "coming-from-hugging-face": (
        "Hugging Face Trainer and Accelerate",
        HUGGING_FACE,
        f"plan --from {EXAMPLES}/accelerate_fsdp.yaml --from {EXAMPLES}/training_arguments.json --model llama-3.1-8b "
        "--cluster h100:16",
        "The YAML of `accelerate config` and the JSON of TrainingArguments, one `--from` each; the model's config.json "
        "is a third `--from`, or `--model`. FSDP, FSDP2, DeepSpeed and DDP are read; Accelerate's Megatron-LM section "
        "is refused, because Megatron-LM's own arguments say more.",
    ),
}
"""Name of a page -> title, system, command of the example, and what is read."""

CHECKPOINTS = {
    "coming-from-torchtitan": """\
[`shardwright convert`](convert.md) takes a checkpoint of torchtitan's Llama 3 to a run here and back: weights, AdamW's
moments, step and learning rate.

```text
shardwright convert outputs/checkpoint/step-1000 moved --to shardwright --model llama-3.1-8b --run run.toml
shardwright train run.toml --set checkpoint.resume=moved
```""",
}
"""Name of a page -> how checkpoints of the system are converted."""


def page(name: str, output: str) -> str:
    """Return the page with the output of its example."""
    title, system, command, about = PAGES[name]
    parts = [
        f"# Coming from {title}\n\nThis page is made from `src/shardwright/readers`. Do not edit it; run "
        f"`python docs/make_coming_from.py`.\n",
        "`shardwright plan --from` reads a configuration of another system. It prints the layout in the terms of this "
        "documentation, the line of each option, the assumptions, the options without counterpart, the predicted step "
        "time and memory of *that system's* software, warnings, and the fastest layouts that the system can run as "
        "changes of its own options. `--write run.toml` writes the layout as a run file, `--json` one JSON document. "
        "Nothing in the files is executed.\n",
        f"{about}\n",
        f"## Example\n\n```sh\nshardwright {command}\n```\n\n```text\n{output}```\n",
        *([] if name not in CHECKPOINTS else [f"## Checkpoints\n\n{CHECKPOINTS[name]}\n"]),
        "## Options that are read\n\n| option | here | default | note |\n| --- | --- | --- | --- |",
        *(_row(option, system) for option in system.options.values() if option.fate == READ),
        "\n## Options without counterpart\n\nEach is named in the output with its line. An option that this page does "
        "not name is reported in the same way; one that is nearly spelled like an option above is refused.\n",
        *_groups(system, NO_COUNTERPART),
        "\n## Options without effect on time and memory\n",
        *_groups(system, NO_EFFECT),
    ]
    text = "\n".join(parts) + "\n"
    prose, _, rest = text.partition("## Example")
    filled = "\n\n".join(fill(each, 120) for each in prose.strip().split("\n\n"))
    return f"{filled}\n\n## Example{rest}"


def _row(option: ForeignOption, system: System) -> str:
    default = "-" if option.default is None else f"`{option.default}`".replace("|", "\\|")
    return f"| {_code(system.spell(option.name))} | {option.key} | {default} | {option.note} |"


def _code(text: str) -> str:
    """Return the name of an option as code; backticks are for keys of a run file, which tests check."""
    return f"<code>{text}</code>"


def _groups(system: System, fate: str) -> list[str]:
    """Return one item for each reason, with its options; a name that ends in `...` stands for all that begin so."""
    names: dict[str, list[str]] = {}
    for option in system.options.values():
        if option.fate == fate:
            names.setdefault(option.note, []).append(_code(system.spell(option.name)))
    for option in system.families:
        if option.fate == fate:
            names.setdefault(option.note, []).append(_code(f"{system.spell(option.name)}..."))
    return [f"- {reason}: {', '.join(options)}" for reason, options in names.items()]


def shown_output(name: str) -> str:
    """Return the output of the example that a page shows now."""
    text = (FOLDER / f"{name}.md").read_text(encoding="utf-8")
    found = re.search(r"```text\n(.*?)```", text, re.DOTALL)
    return found[1] if found else ""


def _output(command: str) -> str:
    run = subprocess.run(
        [sys.executable, "-m", "shardwright", *shlex.split(command)],
        cwd=FOLDER.parent,
        env={"PATH": "/usr/bin:/bin", "COLUMNS": "120"},
        capture_output=True,
        text=True,
        check=False,
    )
    return "\n".join(line.rstrip() for line in run.stdout.splitlines()[:MOST_LINES]) + "\n"


if __name__ == "__main__":
    for each, (_, _, shown, _) in PAGES.items():
        (FOLDER / f"{each}.md").write_text(page(each, _output(shown)), encoding="utf-8")
