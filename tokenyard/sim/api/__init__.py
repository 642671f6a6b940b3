"""The Python API of the simulator; its names are public as `tokenyard.sim.NAME` (docs/simulator.md)."""
