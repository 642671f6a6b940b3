"""Prometheus metrics, load reports, request logs and traces."""
