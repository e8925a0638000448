"""A decoder-only transformer on one device: sizes, layers, random numbers."""
