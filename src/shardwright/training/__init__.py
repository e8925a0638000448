"""Running it: start the workers, take steps, log, evaluate, save and go on after a fault."""
