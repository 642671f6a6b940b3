"""One simulated engine: the real scheduler, and an executor that computes how long steps take."""
