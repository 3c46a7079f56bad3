"""`bagua-net test`: `bagua-net-bench --nccl` on the user's own nodes, with a verdict on the plugin.

The command starts the user's launcher with `rank_script.py`. Its ranks run the comparison of `bagua.net.bench.nccl_ab`,
or with gloo where there are no GPUs, and rank 0 tells the command the result.
"""
