"""From logits to tokens, on the device, for all rows of a step at once."""
