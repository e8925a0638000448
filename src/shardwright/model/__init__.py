"""A decoder-only transformer as one device runs it: its sizes, its layers, its random numbers."""
