"""A decoder-only transformer on one device: its sizes, its layers, its random numbers."""
