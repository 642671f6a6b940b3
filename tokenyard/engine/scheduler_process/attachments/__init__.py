"""What stands next to the event loop: adapters, grammars, KV to and from other places, KV events, look-ahead."""
