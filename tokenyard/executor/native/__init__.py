"""Kernels for CPUs: a small C++ library with a plain C interface, built where a compiler is available."""
