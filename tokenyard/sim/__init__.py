"""The simulator: the scheduler that serves, driven by a cost model's clock instead of a device."""
