"""`measure memory`: bytes per parameter of each algorithm."""
