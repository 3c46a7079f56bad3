"""`measure convergence`: final losses of all algorithms, on data that packages ship."""
