"""How a request goes on when its scheduler has ended: as requests that arrive with what their answers had so far."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

import numpy as np

from tokenyard.base import Cancel, Pause, Request, Resume, Submit, Update
from tokenyard.base.request import NO_TOKENS
from tokenyard.engine.processes.messages import Fenced, ToScheduler


def answers_so_far(fenced: Fenced) -> dict[int, list[int]]:
    """The output tokens of each answer that has begun, by number."""
    tokens, begun, start = fenced.tokens.tolist(), {}, 0
    for number, count in zip(fenced.numbers.tolist(), fenced.token_counts.tolist(), strict=True):
        begun[number] = tokens[start : start + count]
        start += count
    return begun


def unknown_progress(source: int) -> Fenced:
    """What stands for the word of a text side that has ended with all it knew."""
    return Fenced(source, np.empty(0, np.int64), NO_TOKENS, NO_TOKENS)


def first_number(event: ToScheduler) -> int:
    """The number of the answer that an event for a scheduler is about, or of the first one; 0 for none."""
    match event:
        case Submit():
            return event.request.number
        case Update():
            return event.number
        case Cancel() | Pause() | Resume():
            return event.numbers[0] if event.numbers else 0
    return 0


def continuation_requests(
    request: Request, open_answers: Collection[int], begun: Mapping[int, Sequence[int]]
) -> list[Request]:
    """The requests that bring the answers with these indices to their end, with the same tokens as without the break.

    It is the request itself while none of its answers has begun or ended: they share what they compute. Otherwise each
    open answer is a request of its own, by its own number and seed.
    """
    numbers = {index: request.number + index for index in sorted(open_answers)}
    if len(numbers) == request.sampling.n and not any(begun.get(number) for number in numbers.values()):
        return [request]
    return [_answer(request, index, begun.get(number, ())) for index, number in numbers.items()]


def _answer(request: Request, index: int, tokens: Sequence[int]) -> Request:
    return replace(
        request,
        number=request.number + index,
        sampling=replace(request.sampling, n=1, seed=request.sampling.seed + index),
        output_ids=np.array(tokens, dtype=np.int32) if tokens else request.output_ids,
        text=replace(request.text, shown=-1) if tokens else request.text,
    )
