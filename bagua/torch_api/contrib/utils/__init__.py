"""Kept paths of Bagua 0.9."""
