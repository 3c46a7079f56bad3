# ranks: 1
"""The Python interface of the plugin, as the page about switching it on shows it."""

from support.page_programs import run_blocks

env = {"ENABLE_BAGUA_NET": "1"}

run_blocks("docs/how-to/switch-on.md", 1)

assert result.state is bagua.net.ActivationState.NOT_ASKED
