"""Proves that quickstart goes from nothing to a model that has learned something, reuses what is there, and goes on.

Real corpus, real workers, few steps; the time is mostly that of tokenising this machine's standard library.
"""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from shardwright.cli.main import app
from tests.marks import prove


def quickstart(out: Path, steps: int) -> dict[str, object]:
    result = CliRunner().invoke(app, ["quickstart", "--out", str(out), "--steps", str(steps), "--json"])
    assert result.exit_code == 0, result.output
    answer: dict[str, object] = json.loads(result.output)
    return answer


@prove
@pytest.mark.timeout(400)
def test_quickstart_trains_then_reuses_what_is_there_then_goes_on(tmp_path: Path):
    out = tmp_path / "quickstart"
    first = quickstart(out, 6)
    assert sum(path.stat().st_size for path in (out / "corpus").rglob("*.py")) >= 10_000_000
    assert first["steps"] == 6
    assert float(str(first["validation_loss"])) < float(str(first["first_validation_loss"]))
    for made in ("quickstart.toml", "run/metrics.jsonl", "run/curves.png", "run/report.html"):
        assert (out / made).stat().st_size > 0
    assert str(first["sample"]).startswith("def read_file(path):")

    manifest = (out / "data" / "manifest.json").stat().st_mtime_ns
    records = (out / "run" / "metrics.jsonl").read_text()
    again = quickstart(out, 6)
    assert again["validation_loss"] == first["validation_loss"]
    assert (out / "run" / "metrics.jsonl").read_text() == records

    further = quickstart(out, 8)
    assert further["steps"] == 8
    assert (out / "run" / "metrics.jsonl").read_text().startswith(records)
    assert (out / "data" / "manifest.json").stat().st_mtime_ns == manifest
