"""Dry runs: the real training program as any rank of any world, on fake tensors, to record allocations and messages."""
