"""In front of several engines: who serves which request."""
