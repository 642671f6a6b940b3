"""Stores of KV blocks below the device: on disk, in host memory, and shared by several engines."""
