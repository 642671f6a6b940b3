"""Load generation: data sets, the client that sends requests at drawn times, and the table of results."""
