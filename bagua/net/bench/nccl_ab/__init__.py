"""`bagua-net-bench --nccl`: the transports of the real NCCL side by side, on GPUs."""
