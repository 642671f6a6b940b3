"""The engine in the API process: tokenizer manager, streams, and which rank has which request."""
