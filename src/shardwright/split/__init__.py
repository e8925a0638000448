"""The partition of parameters, sequences and layers over the ranks, as tables and arithmetic; no torch."""
