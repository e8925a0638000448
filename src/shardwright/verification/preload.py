"""Imports of the server process that ranks are forked from; no autograd may run here."""

import importlib
import os
from contextlib import suppress

import shardwright.training.preload
import shardwright.verification.rank
import shardwright.verification.reference  # noqa: F401
from shardwright.verification.ranks import ADAPTER

if _adapter := os.environ.pop(ADAPTER, ""):
    with suppress(Exception):  # an exception ends the server; the ranks import the module again and report it
        importlib.import_module(_adapter)
