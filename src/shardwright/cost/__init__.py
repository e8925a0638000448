"""What a layout costs, in bytes, FLOPs and seconds: formulas with their sources; no torch."""
