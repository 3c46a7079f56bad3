#!/usr/bin/env python3
"""Writes the reference of bagua.torch_api as HTML, from the docstrings, with pdoc:

    python tools/docs/generate_api.py build/docs/api

Needs the package installed, with torch (`make docs` does that). What pdoc warns of is an error: a page that lacks
something would not say so.
"""

from __future__ import annotations

import argparse
import importlib
import pkgutil
import warnings
from pathlib import Path

import pdoc

PACKAGE = "bagua.torch_api"
# What those who write algorithms, or handle failures, meet beside it.
BESIDE = (
    "bagua.collectives.communicator",
    "bagua.collectives.failure_report",
    "bagua.collectives.process_group",
    "bagua.comm_ops.centralized",
    "bagua.engine.bucket",
    "bagua.engine.bucket_op",
    "bagua.engine.comm_scheduler",
    "bagua.engine.data_parallel",
)


def module_names() -> list[str]:
    """All modules of the package by name, because pdoc by itself leaves out those that a package's `__all__` does not
    name; what it finds by itself must not be named again."""
    package = importlib.import_module(PACKAGE)
    by_itself = set(pdoc.extract.walk_specs([PACKAGE]))
    every = {found.name for found in pkgutil.walk_packages(package.__path__, PACKAGE + ".")}
    return [PACKAGE, *sorted(every - by_itself), *BESIDE]


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Writes the reference of bagua.torch_api as HTML, from the docstrings, with pdoc."
    )
    parser.add_argument("folder", type=Path, help="where the pages go, with index.html")
    folder = parser.parse_args().folder
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        parser.error(f"folder {str(folder)!r} cannot be created ({error.strerror}); choose another")
    warnings.simplefilter("error", UserWarning)
    pdoc.render.configure(docformat="google", show_source=False, footer_text="bagua.torch_api")
    pdoc.pdoc(*module_names(), output_directory=folder)
    print(f"wrote {folder / 'index.html'}")


if __name__ == "__main__":
    main()
