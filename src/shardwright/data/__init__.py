"""Text into token shards, and token shards into batches: tokenise, store, order, load."""
