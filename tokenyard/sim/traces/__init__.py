"""The requests of a simulation: readers of recorded traces, generators of synthetic ones."""
