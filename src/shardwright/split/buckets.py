"""How gradients are grouped for their all-reduce, and logits in the loss."""

from shardwright.system.units import MiB

BUCKET_BYTES = 25 * 2**20
"""Bytes of gradients that ZeRO-0 sums in one all-reduce, unless one parameter has more: enough for full bandwidth, and
few enough that the first buckets are reduced while the backward pass computes the others. As in PyTorch's DDP (Li et
al., arXiv 2006.15704)."""
REPLICA_BUCKET_BYTES = 64 * MiB
"""Bytes of compressed gradients, as they are before that, that are summed over replicas at once where FSDP2 shards,
unless one has more."""
LOGITS_TOGETHER = 2**22
"""Logits that the loss takes at a time on a CPU where it copies them to fp32: 16 MiB."""
LOGITS_TOGETHER_ON_GPU = 2**26
"""The same on a GPU: 256 MiB, enough that its kernels take longer than their launches."""
CONVERTED_BYTES = 64 * MiB
"""Bytes of gradients in the compute type that a single rank converts to the type of the parameters at once."""
