"""What a run does about faults: hangs, stragglers, spikes, numbers that are not finite, unequal copies, restarts."""
