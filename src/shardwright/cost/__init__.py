"""The cost model: memory, FLOPs and step time of layouts, as formulas with their sources. Does not import torch."""
