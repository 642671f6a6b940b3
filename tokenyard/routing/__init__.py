"""Which engine, worker or rank gets a request: pure, for the router, for engines with several ranks, and for the
simulator.
"""
