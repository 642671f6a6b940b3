"""Where KV lies in memory, its checksum, and what makes the KV of one engine good for another."""
