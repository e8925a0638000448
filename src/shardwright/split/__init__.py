"""How parameters, sequences and layers are partitioned over the ranks, as tables and arithmetic; no torch."""
