"""What activation has to tell the user: on stderr, through the logger `bagua.net`, once.

[Note: once] A job is many processes that all find the same things: torchrun itself, its ranks, their data loaders.
Only the first process of a tree speaks: it leaves a digest of what it said in the environment, for its children. Of
processes without a common parent that could leave it (srun, mpirun) only local rank 0 speaks: hosts may differ.
"""

from __future__ import annotations

import zlib
from collections.abc import MutableMapping, Sequence

from bagua.launch_environment import job_position

# Not BAGUA_NET_*: it is not a setting, and the library warns about unknown names of that kind.
_SAID_VARIABLE = "_BAGUA_NET_SAID"


def report(messages: Sequence[str], environment: MutableMapping[str, str]) -> None:
    """Logs the messages that neither this process nor a parent of it has logged. `environment` is normally
    os.environ: the record of what was said is kept there."""
    said = environment.get(_SAID_VARIABLE, "").split()
    new = [message for message in dict.fromkeys(messages) if _digest(message) not in said]
    if not new:
        return
    environment[_SAID_VARIABLE] = " ".join([*said, *map(_digest, new)])
    position = job_position(environment)
    if (position.rank if position.local_rank is None else position.local_rank) not in (None, 0):
        return
    # Imported here: most processes have nothing to say.
    import logging

    for message in new:
        logging.getLogger("bagua.net").warning("Bagua-Net: %s", message)


def _digest(message: str) -> str:
    return f"{zlib.crc32(message.encode(errors='replace')):08x}"
