"""The parts of compare_ddp.py, one concept a file. A package beside that script, which makes it importable."""
