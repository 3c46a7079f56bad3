"""Makes the replicas of a module equal, and finds out whether they are: parameters, buffers and optimizer states. Knows
neither buckets nor training steps."""
