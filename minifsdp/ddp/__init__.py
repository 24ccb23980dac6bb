"""Distributed data parallelism in three rungs."""
