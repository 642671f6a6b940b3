"""The KV store: blocks on disk, in host memory, and shared by several engines."""
