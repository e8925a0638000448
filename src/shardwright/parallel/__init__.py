"""Parallelises a model: one file or folder for each axis, and `apply.py`, which applies the axes in order."""
