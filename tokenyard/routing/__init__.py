"""Choose the target of each request, with load, prefix index and queue. Pure.

The router, engines with several ranks and the simulator share it.
"""
