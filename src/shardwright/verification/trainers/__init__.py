"""Compares a trainer of any system with one process: `Trainer` classes, run on gloo ranks of this machine's CPU.

`adapter.py` defines the objects that a Trainer class receives and returns, `rank.py` runs a Trainer on a rank, and
`parity.py` compares. The other files are adapters: `verify --trainer NAME` runs the adapter NAME.py.
"""
