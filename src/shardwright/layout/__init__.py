"""The layout: its degrees and choices, their keys, and the numbering of ranks; no torch."""
