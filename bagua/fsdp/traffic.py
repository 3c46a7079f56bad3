"""Counters of bytes. Written by the threads that communicate, forward's and autograd's, one at a time."""

from __future__ import annotations


class Traffic:
    """What one rank sends for one purpose: to other nodes, or in a job of one node, to other ranks.

    Attributes:
        sent: bytes that were sent.
        saved: bytes that torch's own collective would have sent on top of these; negative where it would send less.
    """

    def __init__(self) -> None:
        self.sent = 0
        self.saved = 0

    def count(self, sent: int, plain: int) -> None:
        """
        Args:
            sent: bytes that this rank has sent.
            plain: bytes that it would have sent without compression.
        """
        self.sent += sent
        self.saved += plain - sent

    def as_dict(self) -> dict[str, int]:
        return {"sent": self.sent, "saved": self.saved}
