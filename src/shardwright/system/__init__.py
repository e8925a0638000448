"""Files, processes, errors, units and other services that the package needs from Python, PyTorch and the machine."""
