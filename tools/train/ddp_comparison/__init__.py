"""The parts of compare_ddp.py, one concept a file. The script makes it importable."""
