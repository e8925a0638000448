"""The cost of a step of reinforcement learning: generation, scoring, training and the transfer of weights."""
