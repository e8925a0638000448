"""The search over all layouts of a job, and the reasons for its recommendation. Does not import torch."""
