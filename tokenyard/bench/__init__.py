"""Load generation: data sets, the client that sends them at drawn times, and the table of what came back."""
