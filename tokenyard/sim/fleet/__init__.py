"""A simulated fleet: engines, routers, and what happens to them, in virtual time."""
