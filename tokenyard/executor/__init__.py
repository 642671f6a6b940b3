"""Back ends that run plans. This file imports nothing, so that the mock works where torch is not installed."""
