"""What programs and back ends speak of: prompts, wishes for a generated part, and what comes back."""

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

ChoicesMethod = Literal["token_length_normalized", "greedy_token_selection", "unconditional_likelihood_normalized"]
token_length_normalized: ChoicesMethod = "token_length_normalized"
"""The choice with the highest mean log-probability of its tokens."""

greedy_token_selection: ChoicesMethod = "greedy_token_selection"
"""The choice that is made token by token, each time the likeliest that any choice allows."""

unconditional_likelihood_normalized: ChoicesMethod = "unconditional_likelihood_normalized"
"""The choice whose log-probability gains most by standing behind the prompt."""


@dataclass(frozen=True, slots=True)
class ProgramPrompt:
    """What stands before a generated part: text, or messages of which the last may be one to go on with."""

    text: str = ""
    messages: tuple[dict[str, str], ...] = ()
    continues: bool = False
    open: bool = True
    """Whether the model is to answer; False for a prompt that is only made ready for what follows."""


@dataclass(slots=True)
class StreamPiece:
    """More of a generated part; `meta` is what the back end says of it, in the shape of SGLang's meta_info."""

    text: str
    meta: dict[str, Any] = field(default_factory=dict)


class BaseBackend(Protocol):
    """Answers prompts. All methods are called on the language's own event loop."""

    def generate(
        self, prompt: ProgramPrompt, sampling: dict[str, Any], *, logprobs: bool = False
    ) -> AsyncIterator[StreamPiece]:
        """Go on behind a prompt; `sampling` has the names of `sampling_params` of /generate."""

    async def cache_prefix(self, prompt: ProgramPrompt) -> None:
        """Compute a prompt so that what begins with it finds it in the prefix cache."""

    async def score(self, prompt: ProgramPrompt, choices: Sequence[str], *, alone: bool = False) -> list[list[float]]:
        """Log-probabilities of the tokens of each choice behind the prompt, or with `alone` behind nothing."""
