"""What parsing answers costs: `python -m benchmarks.parse_cost`. Prints microseconds for each piece of text."""

import time

from tokenyard.server.openai.chat_output import chat_deltas
from tokenyard.server.parse.model_formats import FAMILIES
from tokenyard.server.parse.output_parser import OutputParser

PLAIN = "The quick brown fox jumps over the lazy dog, and then some more. " * 40
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "' + "Paris and London " * 60 + '"}}\n</tool_call>'
THOUGHT = "<think>\n" + PLAIN + "</think>\n\n" + PLAIN
TEXTS = {"plain": PLAIN, "reasoning": THOUGHT, "call": CALL}
PIECE_CHARS = 4
ROUNDS = 50


def microseconds(text: str) -> float:
    """The mean of one piece, with the deltas of a stream made of it."""
    pieces = [text[at : at + PIECE_CHARS] for at in range(0, len(text), PIECE_CHARS)]
    began = time.perf_counter()
    for _ in range(ROUNDS):
        parser = OutputParser(FAMILIES["hermes"], tools={"get_weather": {}})
        for piece in pieces:
            chat_deltas(parser.feed(piece))
        parser.finish()
    return (time.perf_counter() - began) / (ROUNDS * len(pieces)) * 1e6


def main() -> None:
    """Print a line for each kind of text."""
    for name, text in TEXTS.items():
        print(f"{name:10} {microseconds(text):6.2f} us a piece of {PIECE_CHARS} characters")


if __name__ == "__main__":
    main()
