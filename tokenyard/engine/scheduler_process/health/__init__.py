"""What watches a scheduler process: liveness, watchdog, guards over user code, step log, profile."""
