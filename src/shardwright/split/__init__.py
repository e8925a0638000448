"""How a model's matrices and a sequence's tokens are cut over the ranks, as tables and arithmetic; no torch."""
