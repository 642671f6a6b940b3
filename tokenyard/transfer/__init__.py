"""Moves KV between engines: a protocol that is a pure machine (`protocol/`), and transports that carry bytes."""
