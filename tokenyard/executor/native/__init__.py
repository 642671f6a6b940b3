"""The CPU's own kernels: a small C++ library behind a plain C interface, built where a compiler is."""
