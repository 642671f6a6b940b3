"""The HTTP server: OpenAI, Anthropic, Ollama and native APIs, streams, metrics."""
