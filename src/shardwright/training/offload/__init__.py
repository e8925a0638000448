"""Optimizer states outside of the device memory: in host memory, or in a file on a disk."""
