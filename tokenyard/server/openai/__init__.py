"""OpenAI's API: chat, completions, responses, embeddings."""
