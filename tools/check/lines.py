"""What tests start, load or read without naming it: for each folder of tests/, and for a file that needs more.

A name is a module of bagua, a folder of net_plugin/ or tools/, `docs` or `examples`; `*` stands for any characters.
What a test names itself, as an import, a path or a command, is found in its text and needs no line.
"""

from __future__ import annotations

LINES: dict[str, tuple[str, ...]] = {
    "codecs": (),
    "compat": ("bagua.*", "net_plugin/*", "tools/*"),  # reads all sources
    "contrib": (),
    "cpp": (),  # what the sources of each test include
    "distributed": (),
    "distributed/test_page_programs.py": ("bagua.*", "docs", "examples"),  # runs the programs of pages
    "docs": ("bagua.*", "docs", "tools/docs"),  # reads pages, and the docstrings that they show
    "gpu": ("bagua.*", "net_plugin/*", "tools/bench"),  # jobs that load the plugin
    "judges": ("bagua.torch_api", "bagua.torch_api.data_parallel*"),  # torch's own tests, with our wrapper
    "kernels": (),
    "net": ("bagua.net*", "bagua.cli.net*", "net_plugin/*", "tools/bench"),  # commands, the driver, libnccl-net.so
    "packaging": ("bagua.*", "net_plugin/*", "tools/bench", "tools/release"),  # builds the wheel
    "unit": (),
    "unit/test_docs.py": ("bagua.*", "docs", "examples", "net_plugin/config", "tools/*"),  # pages, and what they name
    "unit/test_error_remedies.py": ("bagua.*",),  # reads the sources of the package
    "unit/test_torch_env.py": ("bagua.*",),
    "unit/test_training_page.py": ("bagua.*", "docs"),
}
