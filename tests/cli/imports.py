"""What a verb imports, asked of a new interpreter."""

import subprocess
import sys
from collections.abc import Sequence

HEAVY = {"torch", "numpy", "matplotlib", "shardwright.config", "tokenizers"}


def help_imports_nothing_heavy(verbs: Sequence[str]) -> None:
    """One interpreter shows the help of these verbs, and has imported nothing of HEAVY."""
    code = (
        "import sys\n"
        "from shardwright.cli.main import main\n"
        f"for verb in {list(verbs)!r}:\n"
        "    sys.argv = ['shardwright', *verb.split(), '--help']\n"
        "    try: main()\n"
        "    except SystemExit: pass\n"
        f"    if heavy := {HEAVY!r} & set(sys.modules): sys.exit(f'{{verb}}: {{heavy}}')\n"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (ended.returncode, ended.stdout.count("Usage: shardwright")) == (0, len(verbs)), ended.stderr


def runs_without(modules: set[str], words: Sequence[object]) -> None:
    """`shardwright WORDS` ends with exit code 0 and has imported none of these modules."""
    code = (
        "import sys; from typer.testing import CliRunner; from shardwright.cli.main import app\n"
        f"made = CliRunner().invoke(app, {[str(each) for each in words]!r})\n"
        "assert made.exit_code == 0, made.output\n"
        f"sys.exit(bool({modules!r} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0
