"""Shardwright trains large models across many accelerators, and proves that it computes what one device does."""

from shardwright.layout import Layout

__all__ = ["Layout"]
__version__ = "0.1.0"
