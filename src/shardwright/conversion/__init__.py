"""Training checkpoints of other systems: weights, AdamW's moments, step and settings, read and written.

`formats.py` has the table of formats. All of them meet in a `TrainingState` under Shardwright's parameter names.
"""
