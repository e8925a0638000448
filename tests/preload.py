"""What the tests add to the server that ranks are forked from; no autograd may run here."""

import signal

import tests.training.worlds  # noqa: F401

# Ranks leave Ctrl-C to their parent, but the whole runs of tests/training/runs.py have to answer it themselves.
signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
