"""Text to token ids: chat templates and tokenizers."""
