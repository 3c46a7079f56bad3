"""bagua-net-bench: what the network plugin does on this machine, beside its alternatives and its limit.

`ring` and `nccl_ab` are its kinds of run, which know nothing of one another; beside them is what they share.
Nothing is imported here: `bagua.net` and the GPU mode pick the modules that they need, and none of them needs torch.
"""
