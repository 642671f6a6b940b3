"""The KV store (SGLang's HiCache): blocks on disk, in host memory, and shared by several engines."""
