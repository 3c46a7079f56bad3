"""Tables and plots of the documentation, made from the result files in docs/results."""
