"""The real training program as any rank of any world, on fake tensors: what it allocates and sends."""
