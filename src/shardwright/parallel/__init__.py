"""Parallelises a model from outside: one file or folder for each axis, and apply.py, which applies them in order."""
