"""Checkpoints of training. Of what trains a model they know `contents.Engine` alone."""
