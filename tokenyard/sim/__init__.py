"""The simulator: the server's scheduler, driven by a cost model's clock instead of a device."""
