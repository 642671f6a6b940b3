"""One model over several ranks, each a process: tensor parallelism."""
