"""What compare_optimizer_steps.py consists of."""
