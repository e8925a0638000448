"""Checkpoints: safetensors files and a manifest with checksums, which is published last. Loading never runs code.

RUN/checkpoints/
  step-00000200/             has this name only when complete
    manifest.json            tensors, their shards with a checksum each, and the position of the run
    rank-00000.safetensors   the shards that rank 0 wrote
    rank-00001.safetensors
    run.toml                 the resolved run file
  step-00000250.partial/     being written, or left by a killed process; deleted at the next start
"""
