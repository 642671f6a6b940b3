"""Types shared by programs and back ends: prompts, stream pieces and choices methods."""

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

ChoicesMethod = Literal["token_length_normalized", "greedy_token_selection", "unconditional_likelihood_normalized"]
token_length_normalized: ChoicesMethod = "token_length_normalized"
"""The choice with the highest mean log-probability of its tokens."""

greedy_token_selection: ChoicesMethod = "greedy_token_selection"
"""The choice that greedy decoding constrained to the choices generates."""

unconditional_likelihood_normalized: ChoicesMethod = "unconditional_likelihood_normalized"
"""The choice whose mean log-probability gains most from the prompt."""


@dataclass(frozen=True, slots=True)
class ProgramPrompt:
    """The prompt of a generation.

    text: the prompt of a program without roles.
    messages: the prompt of a program with roles.
    continues: whether to continue the last message.
    """

    text: str = ""
    messages: tuple[dict[str, str], ...] = ()
    continues: bool = False
    open: bool = True
    """Whether the assistant's turn follows; False for a prompt that is only prefilled."""


@dataclass(slots=True)
class StreamPiece:
    """The next part of a generation.

    text: the new text.
    meta: SGLang's `meta_info`.
    """

    text: str
    meta: dict[str, Any] = field(default_factory=dict)


class BaseBackend(Protocol):
    """Generates text (SGLang's `BaseBackend`). All methods are called on the event loop of the language."""

    def generate(
        self, prompt: ProgramPrompt, sampling: dict[str, Any], *, logprobs: bool = False
    ) -> AsyncIterator[StreamPiece]:
        """Generate after a prompt. `sampling`: `sampling_params` of /generate."""

    async def cache_prefix(self, prompt: ProgramPrompt) -> None:
        """Prefill a prompt into the prefix cache."""

    async def score(self, prompt: ProgramPrompt, choices: Sequence[str], *, alone: bool = False) -> list[list[float]]:
        """Log-probabilities of the tokens of each choice after the prompt, or without it if `alone`."""
