"""Fault handling of a run: hangs, stragglers, spikes, non-finite numbers, unequal copies, restarts."""
