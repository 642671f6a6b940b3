"""A server as the back end of programs, through its native API: Tokenyard or SGLang, over HTTP or in-process."""

import json
from collections.abc import AsyncIterator, Sequence
from typing import Any

from tokenyard.lang.interpreter import LOOP
from tokenyard.lang.transport import HttpAnswer, HttpTransport, Transport
from tokenyard.lang.values import ProgramPrompt, StreamPiece


class EndpointError(Exception):
    """The server returned an error, whose message this has, or could not be reached."""


class Endpoint:
    """A server at `base_url`, or behind another transport (SGLang's `RuntimeEndpoint`). `api_key`, if given, is sent
    with each request.
    """

    def __init__(
        self,
        base_url: str = "",
        api_key: str | None = None,
        *,
        timeout_s: float = 600.0,
        transport: Transport | None = None,
    ) -> None:
        """Raises ValueError without a server."""
        if not base_url and transport is None:
            raise ValueError("give the URL of a server, or a transport")
        self._transport = transport or HttpTransport(base_url, api_key, timeout_s=timeout_s)
        self._ids: dict[str, list[int]] = {}

    async def generate(
        self, prompt: ProgramPrompt, sampling: dict[str, Any], *, logprobs: bool = False
    ) -> AsyncIterator[StreamPiece]:
        """Generate after a prompt; yields the pieces."""
        body = {**await self._prompt(prompt), "sampling_params": sampling, "stream": True}
        if logprobs:
            body |= {"return_logprob": True, "return_text_in_logprobs": True}
        shown = ""
        async with self._transport.ask("POST", "/generate", body) as answer:
            await _check(answer)
            async for line in _lines(answer):
                data = line.decode().strip().removeprefix("data: ")
                if not data or data == "[DONE]":
                    continue
                event = json.loads(data)
                if "error" in event:
                    raise EndpointError(_message(event))
                yield StreamPiece(event["text"][len(shown) :], event["meta_info"])
                shown = event["text"]

    async def cache_prefix(self, prompt: ProgramPrompt) -> None:
        """Prefill a prompt into the prefix cache."""
        body = {**await self._prompt(prompt), "sampling_params": {"max_new_tokens": 0, "temperature": 0.0}}
        await self._post("/generate", body)

    async def score(self, prompt: ProgramPrompt, choices: Sequence[str], *, alone: bool = False) -> list[list[float]]:
        """Log-probabilities of the tokens of each choice, which is tokenized separately and appended to the prompt."""
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
            # The first token of a sequence has no log-probability.
            [entry[0] or 0.0 for entry in own[-len(part) :]]
            for own, part in zip(entries, parts, strict=True)
        ]

    def flush_cache(self) -> None:
        """Empty the server's prefix cache."""
        LOOP.run(self._post("/flush_cache", {})).result()

    def get_server_info(self) -> dict[str, Any]:
        """The server's `/get_server_info`."""
        found: dict[str, Any] = LOOP.run(self._get("/get_server_info")).result()
        return found

    def close(self) -> None:
        """Close the connections."""
        if isinstance(self._transport, HttpTransport):
            self._transport.close()

    async def _prompt(self, prompt: ProgramPrompt) -> dict[str, Any]:
        """A prompt as fields of /generate; messages go through the server's chat template."""
        if prompt.messages:
            return {"input_ids": await self._prompt_ids(prompt)}
        return {"text": prompt.text}

    async def _prompt_ids(self, prompt: ProgramPrompt) -> list[int]:
        if not prompt.messages:
            return await self._tokenize({"prompt": prompt.text})
        options: dict[str, Any] = {"messages": list(prompt.messages), "add_generation_prompt": prompt.open}
        if prompt.continues:
            options |= {"add_generation_prompt": False, "continue_final_message": True}
        return await self._tokenize(options)

    async def _text_ids(self, text: str) -> list[int]:
        """The tokens of a choice. Each is requested from the server once."""
        if text not in self._ids:
            self._ids[text] = await self._tokenize({"prompt": text, "add_special_tokens": False})
        return self._ids[text]

    async def _tokenize(self, body: dict[str, Any]) -> list[int]:
        found: list[int] = (await self._post("/tokenize", body))["tokens"]
        return found

    async def _post(self, path: str, body: dict[str, Any]) -> Any:
        return await self._whole("POST", path, body)

    async def _get(self, path: str) -> Any:
        return await self._whole("GET", path, None)

    async def _whole(self, method: str, path: str, body: dict[str, Any] | None) -> Any:
        async with self._transport.ask(method, path, body) as answer:
            await _check(answer)
            return json.loads(b"".join([piece async for piece in answer.pieces]))


async def _lines(answer: HttpAnswer) -> AsyncIterator[bytes]:
    """The lines of a body, which may span pieces."""
    rest = b""
    async for piece in answer.pieces:
        *lines, rest = (rest + piece).split(b"\n")
        for line in lines:
            yield line
    if rest:
        yield rest


async def _check(answer: HttpAnswer) -> None:
    """Raise EndpointError with the server's message if the response is an error."""
    if answer.status >= 400:
        text = b"".join([piece async for piece in answer.pieces]).decode(errors="replace")
        try:
            message = _message(json.loads(text))
        except ValueError:
            message = text[:300]
        raise EndpointError(f"{answer.status}: {message}")


def _message(body: Any) -> str:
    error = body.get("error", body) if isinstance(body, dict) else body
    return str(error.get("message", error) if isinstance(error, dict) else error)
