"""`shardwright plan` as the tests call it, and what they ask."""

import json
from pathlib import Path
from typing import Any

from typer.testing import CliRunner, Result

from shardwright.cli.main import app

SMALL = ("--model", "debug", "--cluster", "h100:8", "--global-batch", 16, "--seq-len", 128)
TINY = (*SMALL[:2], "--cluster", "h100:2/2", *SMALL[4:])
REAL = ("--model", "llama-3.1-8b", "--cluster", "h100:8", "--global-batch", 128, "--seq-len", 8192)
TIED = ("--model", "llama-3.1-70b", "--cluster", "h100:32", "--global-batch", 512, "--seq-len", 8192)
EXAMPLES = Path(__file__).parents[2] / "examples"


def plan(*arguments: object, columns: int = 160) -> Result:
    return CliRunner().invoke(app, ["plan", *map(str, arguments)], env={"COLUMNS": str(columns)})


def document(*arguments: object, exit_code: int = 0) -> Any:
    result = plan(*arguments, "--json")
    assert result.exit_code == exit_code, result.output
    return json.loads(result.stdout)
