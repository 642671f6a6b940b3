"""One model over several processes: tensor parallelism, pipeline parallelism and DP attention."""
