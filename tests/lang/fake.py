"""A back end that answers at once, and remembers what it was asked."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import Any

from tokenyard.lang.values import ProgramPrompt, StreamPiece


class FakeBackend:
    """Writes `answer` in pieces of two characters; a choice scores by its place in `liked`, the first best."""

    def __init__(self, answer: str = "abcd") -> None:
        self.answer = answer
        self.liked: list[str] = []
        self.asked: list[tuple[ProgramPrompt, dict[str, Any]]] = []
        self.warmed: list[ProgramPrompt] = []
        self.running = self.most_running = 0
        self.delay_s = 0.0

    async def generate(
        self, prompt: ProgramPrompt, sampling: dict[str, Any], *, logprobs: bool = False
    ) -> AsyncIterator[StreamPiece]:
        self.asked.append((prompt, sampling))
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        await asyncio.sleep(self.delay_s)
        self.running -= 1
        if self.answer == "fail":
            raise RuntimeError("the back end failed")
        text = self.liked[0] if "regex" in sampling and self.liked else self.answer
        for at in range(0, len(text), 2):
            yield StreamPiece(text[at : at + 2], {"completion_tokens": at + 2})

    async def cache_prefix(self, prompt: ProgramPrompt) -> None:
        self.warmed.append(prompt)

    async def score(self, prompt: ProgramPrompt, choices: Sequence[str], *, alone: bool = False) -> list[list[float]]:
        if alone:
            return [[-9.0 if choice == self.liked[-1] else -1.0] for choice in choices]
        return [[-1.0 - self.liked.index(choice)] * len(choice) for choice in choices]
