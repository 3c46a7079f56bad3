"""`python -m bagua` is `bagua`, whose help names the other commands."""

from __future__ import annotations

import sys

from bagua.cli.main import main

sys.exit(main())
