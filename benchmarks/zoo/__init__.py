"""Policies of papers on the simulator's public API, with one small experiment each.

`python -m benchmarks.zoo` prints our figure next to the paper's claim.
"""
