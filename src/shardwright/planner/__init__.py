"""Which layout to take: the search over all of them, and why; no torch."""
