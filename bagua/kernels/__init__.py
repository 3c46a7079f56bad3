"""Compute kernels of the communication: one operation a file, each with a plain torch reference."""
