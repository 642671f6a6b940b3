"""Engines and simulations on a Ray cluster, which places, restarts and scales them. No other package imports Ray."""
