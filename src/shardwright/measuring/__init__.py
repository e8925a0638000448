"""Measurement of this machine, rank by rank, for the tables of `cost.hardware`."""
