# ranks: 2
# needs: torchft
"""Two replicas train, each with a store of its own, and a Lighthouse that the first one serves."""

import os
import warnings

import torch
import torch.distributed as dist
from support.page_programs import equal_on_all_ranks, run_blocks
from torchft.coordination import LighthouseServer

warnings.simplefilter("ignore")  # of torchft
rank = int(os.environ["RANK"])
dist.init_process_group("gloo")
address = [""]
if rank == 0:
    lighthouse = LighthouseServer(bind="[::]:0", min_replicas=2, join_timeout_ms=60_000)
    address = [f"http://127.0.0.1:{lighthouse.address().rpartition(':')[2]}"]
dist.broadcast_object_list(address)
served = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
os.environ.update(TORCHFT_LIGHTHOUSE=address[0], RANK="0", WORLD_SIZE="1", MASTER_PORT=str(served.port))
torch.manual_seed(rank)

run_blocks("docs/reference/api/torchft.md", 1)
run_blocks("docs/how-to/train/use-torchft.md", 1)

assert equal_on_all_ranks(*net.parameters())
assert manager.current_step() == 50
