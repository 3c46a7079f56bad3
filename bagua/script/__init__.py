"""Console scripts of Bagua 0.9."""
