"""Checkpoints that never lie and never run code: safetensors, a manifest with checksums, published last.

RUN/checkpoints/
  step-00000200/             there under this name only when whole
    manifest.json            tensors, their shards, a checksum of each, and where the run stood
    rank-00000.safetensors   the shards that rank 0 wrote
    rank-00001.safetensors
    run.toml                 the resolved run file
  step-00000250.partial/     being written, or left by a process that was killed; swept at the next start
"""
