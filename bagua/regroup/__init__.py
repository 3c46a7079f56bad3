"""The job goes on without the rank that it lost. Who owns what: docs/design/regroup.md."""
