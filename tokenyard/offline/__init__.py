"""Generation without a server."""

from tokenyard.offline.generation import Completion, Generation, Prompt
from tokenyard.offline.llm import LLM
from tokenyard.offline.sampling_params import SamplingParams

__all__ = ["LLM", "Completion", "Generation", "Prompt", "SamplingParams"]
