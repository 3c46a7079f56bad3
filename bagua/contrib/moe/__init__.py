"""Mixtures of experts whose experts are spread over the ranks."""
