"""Weights that stay packed: formats, and the matrices of a model as runs of rows that each have one."""
