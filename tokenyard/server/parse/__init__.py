"""Parses a model's text into reasoning, content and tool calls. One parser, driven by a format per model family."""
