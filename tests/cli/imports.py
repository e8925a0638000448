"""What a verb imports, asked of a new interpreter."""

import subprocess
import sys
from collections.abc import Sequence

HEAVY = {"torch", "numpy", "matplotlib", "shardwright.config", "tokenizers"}


def help_imports_nothing_heavy(words: Sequence[str]) -> None:
    """`shardwright WORDS` that ends with its help has imported nothing of HEAVY."""
    code = (
        f"import sys; sys.argv = ['shardwright', *{list(words)!r}]\n"
        "from shardwright.cli.main import main\n"
        "try: main()\n"
        "except SystemExit: pass\n"
        f"heavy = {HEAVY!r} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, timeout=60)


def runs_without(modules: set[str], words: Sequence[object]) -> None:
    """`shardwright WORDS` ends with exit code 0 and has imported none of these modules."""
    code = (
        "import sys; from typer.testing import CliRunner; from shardwright.cli.main import app\n"
        f"made = CliRunner().invoke(app, {[str(each) for each in words]!r})\n"
        "assert made.exit_code == 0, made.output\n"
        f"sys.exit(bool({modules!r} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0
