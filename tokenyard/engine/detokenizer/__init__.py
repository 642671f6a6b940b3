"""The detokenizer process: token ids to text, and stop strings."""
