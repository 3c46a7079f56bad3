"""bagua-net-bench: what the network plugin does on this machine, beside its alternatives and its limit.

Nothing is imported here: `bagua.net` and the GPU mode pick the modules that they need, and none of them needs torch.
"""
