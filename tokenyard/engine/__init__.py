"""The processes of the engine: event loop, text side, tokenizer manager, and what starts and watches them."""
