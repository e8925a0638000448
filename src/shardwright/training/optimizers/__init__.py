"""The optimizers of `shardwright.optimizers`, one file each."""
