"""What algorithms do with a bucket: implementations of bagua.engine.bucket.BucketOp."""
