"""The text side of the engine: chat templates, tokenizers, incremental detokenization, stop strings."""
