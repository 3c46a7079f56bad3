"""`bagua-net doctor --peer HOST`: two hosts examine the network between them, without a job."""
