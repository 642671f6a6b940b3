"""A simulated fleet: engines, routers, faults and drains, in virtual time."""
