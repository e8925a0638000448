"""What `import shardwright` offers to a script or a notebook: one function for each thing the command does."""
