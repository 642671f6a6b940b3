"""The processes of the engine: event loop, text side, tokenizer manager, and who starts and watches them."""
