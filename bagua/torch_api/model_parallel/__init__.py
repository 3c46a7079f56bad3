"""Models whose parts are on different ranks."""
