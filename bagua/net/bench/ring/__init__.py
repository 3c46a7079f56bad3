"""`bagua-net-bench` without `--nccl`: a ring all-reduce over the plugin, bare sockets and raw TCP."""
