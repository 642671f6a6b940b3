"""Models in one GGUF file (llama.cpp's format), read with the `gguf` package (extra `gguf`)."""
