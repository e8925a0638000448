"""Shardloom plans, proves and trains large neural networks across many accelerators."""

__version__ = "0.1.0"
