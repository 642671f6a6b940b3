"""Engines and simulations on a Ray cluster: Ray places, restarts and scales them. The only room that imports Ray."""
