"""Shardloom trains large neural networks across many accelerators, and shows that it computes what one device does."""

from shardloom.layout import Layout

__all__ = ["Layout"]
__version__ = "0.1.0"
