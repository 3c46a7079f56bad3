"""The parts of compare_convergence.py, one concept a file. The script makes it importable."""
