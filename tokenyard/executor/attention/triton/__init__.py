"""Attention and small layers by Triton kernels of our own, over token slots of the paged pool: for CUDA devices."""
