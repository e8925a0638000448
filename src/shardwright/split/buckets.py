"""How gradients that are not sharded are grouped for their all-reduce."""

BUCKET_BYTES = 25 * 2**20
"""Bytes of gradients that ZeRO-0 sums in one all-reduce, unless one parameter has more: enough for full bandwidth, and
few enough that the first buckets are reduced while the backward pass computes the others. As in PyTorch's DDP (Li et
al., arXiv 2006.15704)."""
