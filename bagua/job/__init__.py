"""What the processes of a job know of each other: where they run, who waits for whom, and who is gone."""
