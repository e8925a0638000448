"""Files, processes, errors, units and everything else that the package asks of Python, PyTorch and the machine."""
