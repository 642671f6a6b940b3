"""The scheduler process: the event loop, its driver, and what is attached to it."""
