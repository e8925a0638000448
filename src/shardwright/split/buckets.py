"""Bucket sizes of gradients in their all-reduce, and of logits in the loss."""

from shardwright.system.units import MiB

BUCKET_BYTES = 25 * 2**20
"""Bytes of gradients that ZeRO-0 sums in one all-reduce, unless one parameter has more.

Large enough for full bandwidth, and small enough that the first buckets are reduced while the backward pass computes
the others. As in PyTorch's DDP (Li et al., arXiv 2006.15704).
"""
REPLICA_BUCKET_BYTES = 64 * MiB
"""Bytes of compressed gradients, measured before compression, that are summed over replicas at once where FSDP2 shards,
unless one gradient has more."""
LOGITS_TOGETHER = 2**22
"""Number of logits that the loss processes at a time on a CPU, where it copies them to fp32: 16 MiB."""
LOGITS_TOGETHER_ON_GPU = 2**26
"""`LOGITS_TOGETHER` on a GPU: 256 MiB, enough that the kernels take longer than their launches."""
CONVERTED_BYTES = 64 * MiB
"""Bytes of gradients that a single rank converts at once from the compute type to the type of the parameters."""
