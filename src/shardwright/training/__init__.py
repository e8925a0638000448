"""Training a run: start the workers, take steps, log, evaluate, save, and restart after a fault."""
