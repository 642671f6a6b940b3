"""What the server reports of itself: Prometheus metrics, load reports, logs of requests, traces."""
