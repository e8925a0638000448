"""Write the pages docs/coming-from-*.md: a worked example, and each option of another system with its counterpart.

python docs/make_coming_from.py [PAGE ...]
"""

import re
import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from textwrap import fill

from shardwright.readers.hugging_face import HUGGING_FACE
from shardwright.readers.megatron import MEGATRON_LM
from shardwright.readers.nemo import NEMO
from shardwright.readers.table import NO_COUNTERPART, NO_EFFECT, READ, ForeignOption, System
from shardwright.readers.torchtitan import TORCHTITAN

FOLDER = Path(__file__).parent
EXAMPLES = "examples/other-systems"
MOST_LINES = 200
LOGS = {
    "coming-from-megatron-lm": "megatron_llama3_8b.log",
    "coming-from-torchtitan": "torchtitan_llama3_70b.log",
    "coming-from-deepspeed": "deepspeed_zero3.log",
    "coming-from-hugging-face": "accelerate_fsdp.log",
}
"""Name of a page -> the log of its example. Their times are made up; their lines have the form of each system."""
PAGES: dict[str, tuple[str, System, str, str]] = {
    "coming-from-megatron-lm": (
        "Megatron-LM",
        MEGATRON_LM,
        f"plan --from {EXAMPLES}/megatron_llama3_8b.sh --cluster h100:16",
        "A shell script with the usual variables, a file with the arguments alone, or YAML with the arguments in "
        "`MODEL_ARGS`. In a script without a command the options in its variables are taken. The script is parsed: "
        "assignments, arrays, `${NAME}` and `${NAME:-default}`, arithmetic, `if` and `case` with known "
        "conditions, `eval` of a known text, and sourced files next to the script. Loops, functions and the output of "
        "programs are not evaluated; an option whose value depends on them is refused with its line.",
    ),
    "coming-from-nemo": (
        "NeMo, Megatron-Bridge and MLPerf",
        NEMO,
        f"plan --from {EXAMPLES}/nemo_llama3_8b.yaml",
        "YAML of NeMo (with trainer and model) and of Megatron-Bridge (with model, train, ddp); keys that the recipe "
        "sets and the file does not are Megatron-LM's defaults, and the model is `--model` if the file has no "
        "sizes. ${model.key} is resolved; other expressions are refused if their value matters. MLPerf's "
        "config_*.sh is parsed like a script of Megatron-LM, with the files next to it that it sources: "
        "TENSOR_MODEL_PARALLEL, PIPELINE_MODEL_PARALLEL, INTERLEAVED_PIPELINE, CONTEXT_PARALLEL, SEQ_PARALLEL, "
        "MICRO_BATCH_SIZE, MINIBS (samples of a data rank), DGXNNODES, DGXNGPU, FP8 and TP_COMM_OVERLAP count; give "
        "the model by `--model` and the length by `--seq-len`. The options are Megatron-LM's.",
    ),
    "coming-from-torchtitan": (
        "torchtitan",
        TORCHTITAN,
        f"plan --from {EXAMPLES}/torchtitan_llama3_70b.toml --cluster h100:64",
        "A TOML file, or a Python configuration: `--from config_registry.py` with one function, `--from "
        "config_registry.py:llama3_70b` with several. Python is parsed and not executed: assignments, functions of the "
        "file, arguments and arithmetic on numbers are followed. A call whose result is not used is named as not "
        "evaluated; a loop or a condition is refused with its line. Since 2026 torchtitan states batches in tokens. "
        "torchrun sets the number of ranks, so `--cluster` gives it. A configuration that a function of another file "
        "makes is refused with its line, and so is a section of it with options that are read. The value of a function "
        "of another file is unknown; `min`, `max` and `int` of numbers are computed. The flavors of llama3, qwen3, "
        "qwen3_5, deepseek_v3, gpt_oss and kimi_k2_7 are known, debug models too; vision encoders are not priced. "
        "Other models, and the models of transformers_modeling_backend, need `--model config.json`.",
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
    "coming-from-megatron-lm": """\
[`shardwright convert`](convert.md) takes a checkpoint of `--ckpt-format torch_dist` to a run here and back: weights,
AdamW's moments, step, number of samples and learning rate. The distributed optimizer has to save with
`--dist-ckpt-optim-fully-reshardable`.

```text
shardwright convert checkpoints moved --to shardwright --model llama-3.1-8b --run run.toml
shardwright train run.toml --set checkpoint.resume=moved
shardwright convert runs/debug back --to megatron
```""",
    "coming-from-deepspeed": """\
[`shardwright convert`](convert.md) takes checkpoints of ZeRO-1, 2 and 3 and universal checkpoints to a run here, and a
run here to a universal checkpoint: weights, AdamW's moments, step and learning rate.

```text
shardwright convert outputs moved --to shardwright --model llama-3.1-8b --run run.toml
shardwright train run.toml --set checkpoint.resume=moved
shardwright convert runs/debug back --to deepspeed-universal
```""",
    "coming-from-torchtitan": """\
[`shardwright convert`](convert.md) takes a checkpoint of torchtitan's Llama 3 to a run here and back: weights, AdamW's
moments, step and learning rate.

```text
shardwright convert outputs/checkpoint/step-1000 moved --to shardwright --model llama-3.1-8b --run run.toml
shardwright train run.toml --set checkpoint.resume=moved
```""",
}
"""Name of a page -> how checkpoints of the system are converted."""


def commands(name: str) -> list[str]:
    """Return the commands of the examples of a page: its configuration, and two of its log."""
    command = PAGES[name][2]
    if name not in LOGS:
        return [command]
    log, rest = f"{EXAMPLES}/{LOGS[name]}", command.removeprefix("plan ")
    return [command, f"plan explain-log {log} {rest}", f"plan calibrate {log} {rest}"]


def page(name: str, outputs: Sequence[str]) -> str:
    """Return the page with the outputs of its examples."""
    title, system, command, about = PAGES[name]
    parts = [
        f"# Coming from {title}\n\nThis page is made from `src/shardwright/readers`. Do not edit it; run "
        f"`python docs/make_coming_from.py`.\n",
        "`shardwright plan --from` reads a configuration of another system. It prints the layout in the terms of this "
        "documentation, the line of each option, the assumptions, the options without counterpart, the predicted step "
        "time and memory of *that system's* software, warnings, and the fastest layouts that the system can run as "
        "changes of its own options. `--write run.toml` writes the layout as a run file, `--json` one JSON document. "
        "Nothing in the files is executed. `shardwright dryrun --from` and `shardwright verify --from` take the same "
        "files and run the layout dry, or prove it.\n",
        f"{about}\n",
        "## Example\n",
        _example(command, outputs[0]),
        *([] if name not in LOGS else _log(name, outputs)),
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


def _log(name: str, outputs: Sequence[str]) -> list[str]:
    """Return the section about the log of a page's example."""
    about = (
        "`plan explain-log` compares the log of the run with the prediction for its configuration. `plan calibrate` "
        "narrows the prediction for this cluster and software; `--write ours.toml` keeps it for `plan --hardware`. "
        "[How](plan.md#calibrated-by-training-logs). The step times of the example are made up."
    )
    examples = zip(commands(name)[1:], outputs[1:], strict=True)
    filled = fill(about, 120, break_on_hyphens=False)
    return ["## A training log\n", f"{filled}\n", *(_example(*each) for each in examples)]


def _example(command: str, output: str) -> str:
    return f"```sh\nshardwright {command}\n```\n\n```text\n{output}```\n"


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


def shown_outputs(name: str) -> list[str]:
    """Return the outputs of the examples that a page shows now."""
    text = (FOLDER / f"{name}.md").read_text(encoding="utf-8")
    return re.findall(r"```text\n(.*?)```", text, re.DOTALL)[: len(commands(name))]


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
    for each in sys.argv[1:] or PAGES:
        (FOLDER / f"{each}.md").write_text(page(each, [*map(_output, commands(each))]), encoding="utf-8")
