"""Rank processes that a tool starts once and then gives work to. The tools' scripts make it importable."""
