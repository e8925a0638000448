"""Bytes of the cache of keys and values in generation (`generation/cache.py`)."""

from shardwright.model.spec import ModelSpec
from shardwright.split.tensor import kv_replicas


def cache_bytes_per_token(spec: ModelSpec, tp: int, element_bytes: int) -> int:
    """Return the bytes of one token in one layer on a rank of tp.

        grouped heads       2 max(K / tp, 1) C e      with fewer kv heads than ranks each rank has a whole one
        latent attention    (L + P) e                 on every rank of tp, since all heads read it

    K kv heads, C elements of a head, L of the latent vector, P of the rotated key, e bytes of an element. A rank has
    this for the layers of its pipeline stage, and for `batch size x positions` tokens; every rank of cp has all of
    them. Sources: grouped heads, Ainslie et al., arXiv 2305.13245; latent, DeepSeek-V2, arXiv 2405.04434, table 1.
    """
    if spec.latent_attention is not None:
        return (spec.latent_attention.kv_rank + spec.latent_attention.rope_dim) * element_bytes
    return 2 * (spec.n_kv_heads * kv_replicas(spec.n_kv_heads, tp) // tp) * spec.head_dim * element_bytes
