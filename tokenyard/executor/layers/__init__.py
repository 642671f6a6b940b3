"""The small parts that a decoder is built of."""
