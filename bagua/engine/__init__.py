"""Buckets, readiness, launch order and hooks: what every algorithm runs on."""
