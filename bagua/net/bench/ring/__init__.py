"""`bagua-net-bench` without `--nccl` and `--peers`: a ring all-reduce over the plugin, beside bare sockets, gloo and
raw TCP."""
