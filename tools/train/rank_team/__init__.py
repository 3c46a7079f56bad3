"""Rank processes that a tool starts once and then gives work to. A package beside the tools' scripts, which make it
importable."""
