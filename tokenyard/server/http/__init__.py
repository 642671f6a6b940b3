"""HTTP below the APIs: the application, connections, errors, keys and streams."""
