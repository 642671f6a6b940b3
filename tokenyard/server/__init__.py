"""The HTTP side: OpenAI and native API, streams, metrics."""
