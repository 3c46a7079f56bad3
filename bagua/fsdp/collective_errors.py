"""Errors of compressed collectives: of which module and operation, and what to do. In the threads that communicate.

What NCCL notices on the GPU ends the process without an error in Python, as it does with torch's own collectives.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch.distributed as dist

from bagua.error_text import one_line
from bagua.job.failure_report import MAX_ERROR_LENGTH, CollectiveError, is_communication_error
from bagua.job.gone import of_fewer_batches
from bagua.rank_list import rank_list


@contextlib.contextmanager
def named_errors(what: str, *groups: dist.ProcessGroup) -> Iterator[None]:
    """
    Args:
        what: is done, at the beginning of a sentence.
        groups: between whose ranks.

    Raises:
        CollectiveError: in place of an error of communication, which is its cause. Other errors pass as they are.
    """
    try:
        yield
    except Exception as error:
        if not is_communication_error(error):
            raise
        ranks = sorted({rank for group in groups for rank in dist.get_process_group_ranks(group)})
        raise CollectiveError(
            f"{what} failed: a rank exited, came later than the group's timeout, or could not be reached.\n"
            f"On rank {dist.get_rank()}, between {rank_list(ranks)}: {one_line(error, MAX_ERROR_LENGTH)}\n"
            f"Find the first error in the logs of all ranks; if there is none, {of_fewer_batches(join_helps=False)}."
            " Then restart all ranks from the last checkpoint."
        ) from error
