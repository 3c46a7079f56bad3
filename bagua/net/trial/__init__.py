"""`bagua-net test`: a small all-reduce on the user's own nodes, without and with the plugin by turns.

The command starts the user's launcher with `rank_script.py`. Each rank of it starts a worker process for each turn,
because NCCL reads its settings once in a process. The ranks meet at a store of rank 0, which reports to the command.
"""
