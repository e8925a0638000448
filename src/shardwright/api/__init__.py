"""The public Python API of `import shardwright`: one function for each command."""
