"""A whole fleet in one process, in virtual time, with faults that one seed injects (FoundationDB's simulation)."""
