"""Serving: memory, time of prefill and decode, simulation of requests, search over layouts. Does not import torch."""
