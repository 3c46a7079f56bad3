"""`bagua-net top`: live view of one or several hosts in a terminal."""
