"""Generates text from a model: the cache, the passes of a batch of sequences, sampling, and the ranks that run them."""
