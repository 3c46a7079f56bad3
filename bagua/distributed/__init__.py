"""Launchers on top of torchrun: `launch`, `run`, and what `baguarun` is made of. Flags that only Bagua 0.9 had are
those of bagua.legacy, which only this file installs."""

from bagua.distributed import options
from bagua.legacy import launcher_flags

options.further_flags.append(launcher_flags)
