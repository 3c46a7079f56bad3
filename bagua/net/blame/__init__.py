"""Who holds a job up, from the statistics pages of its processes."""
