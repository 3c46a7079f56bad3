"""Process groups and collectives on torch.distributed: gloo for tensors on CPUs, NCCL for those on GPUs."""
