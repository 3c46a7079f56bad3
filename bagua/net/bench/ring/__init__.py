"""`bagua-net-bench` without `--nccl` and `--peers`: a ring all-reduce over the plugin, bare sockets and raw TCP."""
