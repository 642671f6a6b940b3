"""Tokenyard: an LLM serving engine whose scheduler also runs the simulator."""

__version__ = "0.1.0"
