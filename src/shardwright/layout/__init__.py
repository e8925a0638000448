"""The layout: its degrees and choices, its keys, and the numbering of ranks; no torch."""
