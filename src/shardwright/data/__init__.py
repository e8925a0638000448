"""Tokenises text into token shards and loads batches from them: prepare, store, order, read."""
