"""Launchers with the flags of Bagua 0.9, on top of torchrun: `launch`, `run`, and what `baguarun` is made of."""
