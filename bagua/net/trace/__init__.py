"""Traces in the Chrome format: those of Bagua-Net (``BAGUA_NET_TRACE``) and of torch.profiler, in one picture."""

from bagua.net.trace.trace_file import Merged, TraceError, TraceFile, merge

__all__ = ["Merged", "TraceError", "TraceFile", "merge"]
