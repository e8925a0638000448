"""Imports of the server process that ranks are forked from; no autograd may run here."""

import shardwright.training.preload
import shardwright.verification.rank
import shardwright.verification.reference  # noqa: F401
