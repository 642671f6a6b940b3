"""A server as the back end of programs, by its native API: Tokenyard's own or SGLang's."""

import atexit
import json
from collections.abc import AsyncIterator, Sequence
from typing import Any

import aiohttp

from tokenyard.lang.state import LOOP
from tokenyard.lang.values import Piece, Prompt


class EndpointError(Exception):
    """The server refused, with what it says, or could not be reached."""


class Endpoint:
    """A server at `base_url`. `api_key` is sent with each request if there is one."""

    def __init__(self, base_url: str, api_key: str | None = None, *, timeout_s: float = 600.0) -> None:
        self._url = base_url.rstrip("/").removesuffix("/v1")
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._timeout = aiohttp.ClientTimeout(total=timeout_s)
        self._open: aiohttp.ClientSession | None = None
        self._ids: dict[str, list[int]] = {}

    async def generate(
        self, prompt: Prompt, sampling: dict[str, Any], *, logprobs: bool = False
    ) -> AsyncIterator[Piece]:
        """Go on behind a prompt, piece by piece."""
        body = {**await self._prompt(prompt), "sampling_params": sampling, "stream": True}
        if logprobs:
            body |= {"return_logprob": True, "return_text_in_logprobs": True}
        shown = ""
        async with self._session.post(f"{self._url}/generate", json=body) as response:
            await _check(response)
            async for line in response.content:
                data = line.decode().strip().removeprefix("data: ")
                if not data or data == "[DONE]":
                    continue
                news = json.loads(data)
                if "error" in news:
                    raise EndpointError(_message(news))
                yield Piece(news["text"][len(shown) :], news["meta_info"])
                shown = news["text"]

    async def warm(self, prompt: Prompt) -> None:
        """Compute a prompt, so that it lies in the prefix cache."""
        body = {**await self._prompt(prompt), "sampling_params": {"max_new_tokens": 0, "temperature": 0.0}}
        await self._post("/generate", body)

    async def score(self, prompt: Prompt, choices: Sequence[str], *, alone: bool = False) -> list[list[float]]:
        """Log-probabilities of the tokens of each choice, on its own tokens behind those of the prompt."""
        before = [] if alone else await self._prompt_ids(prompt)
        parts = [await self._text_ids(choice) for choice in choices]
        if before:
            await self._post("/generate", {"input_ids": before, "sampling_params": {"max_new_tokens": 0}})
        body = {
            "input_ids": [before + part for part in parts],
            "sampling_params": {"max_new_tokens": 0, "temperature": 0.0},
            "return_logprob": True,
            "logprob_start_len": len(before),
        }
        answers = await self._post("/generate", body)
        entries = [answer["meta_info"]["input_token_logprobs"] for answer in answers]
        return [
            # The very first token of all has no log-probability.
            [entry[0] or 0.0 for entry in own[-len(part) :]]
            for own, part in zip(entries, parts, strict=True)
        ]

    def flush_cache(self) -> None:
        """Empty the server's prefix cache."""
        LOOP.run(self._post("/flush_cache", {})).result()

    def get_server_info(self) -> dict[str, Any]:
        """What the server says of itself."""
        found: dict[str, Any] = LOOP.run(self._get("/get_server_info")).result()
        return found

    def close(self) -> None:
        """Close the connections."""
        if self._open is not None:
            LOOP.run(self._open.close()).result()
            self._open = None

    @property
    def _session(self) -> aiohttp.ClientSession:
        if self._open is None:
            # Programs decide how much runs at once; the server has the queue.
            connector = aiohttp.TCPConnector(limit=0)
            atexit.register(self.close)
            self._open = aiohttp.ClientSession(headers=self._headers, timeout=self._timeout, connector=connector)
        return self._open

    async def _prompt(self, prompt: Prompt) -> dict[str, Any]:
        """A prompt as /generate takes it; messages go through the server's chat template."""
        if prompt.messages:
            return {"input_ids": await self._prompt_ids(prompt)}
        return {"text": prompt.text}

    async def _prompt_ids(self, prompt: Prompt) -> list[int]:
        if not prompt.messages:
            return await self._tokenize({"prompt": prompt.text})
        options: dict[str, Any] = {"messages": list(prompt.messages), "add_generation_prompt": prompt.open}
        if prompt.continues:
            options |= {"add_generation_prompt": False, "continue_final_message": True}
        return await self._tokenize(options)

    async def _text_ids(self, text: str) -> list[int]:
        """The tokens of a choice, which are asked for once."""
        if text not in self._ids:
            self._ids[text] = await self._tokenize({"prompt": text, "add_special_tokens": False})
        return self._ids[text]

    async def _tokenize(self, body: dict[str, Any]) -> list[int]:
        found: list[int] = (await self._post("/tokenize", body))["tokens"]
        return found

    async def _post(self, path: str, body: dict[str, Any]) -> Any:
        async with self._session.post(self._url + path, json=body) as response:
            await _check(response)
            return await response.json(content_type=None)

    async def _get(self, path: str) -> Any:
        async with self._session.get(self._url + path) as response:
            await _check(response)
            return await response.json(content_type=None)


async def _check(response: aiohttp.ClientResponse) -> None:
    """Raise EndpointError, with the server's own words, for an answer that is an error."""
    if response.status >= 400:
        text = await response.text()
        try:
            message = _message(json.loads(text))
        except ValueError:
            message = text[:300]
        raise EndpointError(f"{response.status}: {message}")


def _message(body: Any) -> str:
    error = body.get("error", body) if isinstance(body, dict) else body
    return str(error.get("message", error) if isinstance(error, dict) else error)
