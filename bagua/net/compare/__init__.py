"""`bagua-net compare`: a user's own command with two settings by turns, and a verdict."""
