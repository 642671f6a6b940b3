"""Methods by which the model chooses one of several texts."""

import math
import random
import re
from collections.abc import Sequence
from typing import Any

from tokenyard.lang.values import (
    BaseBackend,
    ChoicesMethod,
    ProgramPrompt,
    greedy_token_selection,
    token_length_normalized,
    unconditional_likelihood_normalized,
)


async def choose(
    backend: BaseBackend, prompt: ProgramPrompt, choices: Sequence[str], temperature: float, method: ChoicesMethod
) -> tuple[str, dict[str, Any]]:
    """Returns (one of `choices`, meta information such as the scores). Each choice is tokenized separately and scored
    after the prompt.

    With a temperature above 0 the choice is sampled by score. Raises ValueError for an unknown method.
    """
    if method == greedy_token_selection:
        return await _greedy(backend, prompt, choices)
    if method not in (token_length_normalized, unconditional_likelihood_normalized):
        raise ValueError(f"unknown choices method {method!r}")
    logprobs = await backend.score(prompt, choices)
    scores = [sum(values) / max(1, len(values)) for values in logprobs]
    if method == unconditional_likelihood_normalized:
        alone = await backend.score(prompt, choices, alone=True)
        scores = [
            score - sum(values) / max(1, len(own)) for score, values, own in zip(scores, alone, logprobs, strict=True)
        ]
    meta = {"scores": scores, "token_logprobs": logprobs}
    if temperature > 0:
        best = max(scores)
        weights = [math.exp((score - best) / temperature) for score in scores]
        return random.choices(list(choices), weights)[0], meta
    return choices[max(range(len(scores)), key=scores.__getitem__)], meta


async def _greedy(backend: BaseBackend, prompt: ProgramPrompt, choices: Sequence[str]) -> tuple[str, dict[str, Any]]:
    """Generate greedily with a regular expression that matches all choices."""
    pattern = "|".join(re.sub(r"([^\w\s])", r"\\\1", choice) for choice in choices)
    longest = max(map(len, choices)) + 8
    sampling = {"regex": f"({pattern})", "temperature": 0.0, "max_new_tokens": 4 * longest}
    pieces = [piece async for piece in backend.generate(prompt, sampling)]
    text = "".join(piece.text for piece in pieces)
    if text not in choices:
        raise ValueError(f"the model generated {text!r}, which is not one of the choices")
    return text, pieces[-1].meta if pieces else {}
