"""What watches a running engine: liveness, guards over user code, recording, logs and profiles."""
