"""What the tests add to the server that ranks are forked from; no autograd may run here.

A rank imports the module of the test whose function it runs, and with it what is imported here: nearly half of the CPU
time of the tests, if every rank did so.
"""

import signal

import hypothesis  # noqa: F401
import pytest  # noqa: F401

import tests.training.bugs.bug
import tests.training.worlds  # noqa: F401

# Ranks leave Ctrl-C to their parent, but the whole runs of tests/training/runs.py have to answer it themselves.
signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell starts its background jobs with SIGINT ignored
