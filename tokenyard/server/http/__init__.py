"""What all APIs share: the application, connections, errors, API keys and streams."""
