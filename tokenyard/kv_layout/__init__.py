"""The layout of KV in memory, its checksum, and the digest of the model that computed it."""
