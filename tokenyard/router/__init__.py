"""A router in front of several engines: which target serves a request, and how the request gets there."""
