"""Serving: memory, time of prefill and decode, requests simulated, the search over layouts; no torch."""
