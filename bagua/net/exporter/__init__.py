"""`bagua-net exporter`: the statistics of a host's processes for Prometheus."""
