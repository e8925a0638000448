"""Starts the tool: `python -m tests.fuzz 20 --seed 7`."""

import os

from shardwright.system.control_groups import brief_waiting

if __name__ == "__main__":
    os.environ.update(brief_waiting())  # OpenMP reads it when PyTorch is imported
    from tests.fuzz.tool import app

    app()
