"""Clients with batches, who want each line answered once, whatever happens to the engine that has them."""

import asyncio
import json
from dataclasses import dataclass
from typing import Any

from tests.world.client import is_prefix

POLL_S = 1.0


@dataclass
class BatchAsk:
    """A batch.

    host: the engine or the router that it is sent to.
    lines: the prompt of each, and how many tokens it asks for.
    weights, divided: as in `client.Ask`.
    """

    number: int
    at_s: float
    host: str
    lines: list[tuple[list[int], int]]
    weights: tuple[str, ...] = ("",)
    divided: bool = False

    def __str__(self) -> str:
        return f"{self.at_s:.2f} s: batch {self.number} to {self.host}, {len(self.lines)} lines"

    def form(self) -> bytes:
        """The form with its file."""
        lines = []
        for place, (prompt, tokens) in enumerate(self.lines):
            body = {"prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
            line = {"custom_id": str(place), "method": "POST", "url": "/v1/completions"}
            lines.append(json.dumps(line | {"body": body | {"return_token_ids": True}}).encode() + b"\n")
        head = b'--cut\r\nContent-Disposition: form-data; name="'
        file = head + b'file"; filename="lines.jsonl"\r\n\r\n' + b"".join(lines) + b"\r\n"
        return head + b'purpose"\r\n\r\nbatch\r\n' + file + b"--cut--\r\n"


async def run(ask: BatchAsk, address: tuple[str, int]) -> list[str]:
    """Send a batch and wait for its end; returns what is wrong with it."""
    form = "multipart/form-data; boundary=cut"
    file = await _until_answered(address, "POST", "/v1/files", ask.form(), form)
    fields = {"input_file_id": file["id"], "endpoint": "/v1/completions", "completion_window": "24h"}
    batch = await _until_answered(address, "POST", "/v1/batches", json.dumps(fields).encode())
    while batch["status"] not in ("completed", "failed", "expired", "cancelled"):
        await asyncio.sleep(POLL_S)
        batch = await _until_answered(address, "GET", f"/v1/batches/{batch['id']}")
        if "error" in batch:
            return [f"after it was taken: {batch['error']}"]
    if batch["status"] != "completed" or batch["output_file_id"] is None:
        return [f"it is {batch['status']}: {batch['errors']}, {batch['request_counts']}"]
    lines = await _until_answered(address, "GET", f"/v1/files/{batch['output_file_id']}/content")
    return _violations(ask, lines if isinstance(lines, list) else [lines])


def _violations(ask: BatchAsk, lines: list[dict[str, Any]]) -> list[str]:
    found, names = [], sorted(int(line["custom_id"]) for line in lines)
    if names != list(range(len(ask.lines))):
        found.append(f"the lines {names} are answered, of {len(ask.lines)}")
    for line in lines:
        prompt, count = ask.lines[int(line["custom_id"])]
        tokens = line["response"]["body"]["choices"][0]["token_ids"]
        if len(tokens) != count or not is_prefix(tokens, prompt, count, "", ask.weights, divided=ask.divided):
            found.append(f"line {line['custom_id']} has {len(tokens)} of {count} tokens, {tokens[:8]}...")
    return found


async def _until_answered(
    address: tuple[str, int], method: str, path: str, body: bytes = b"", kind: str = "application/json"
) -> Any:
    """The content of an answer, tried again while the engine is away or busy."""
    while True:
        try:
            status, data = await _exchange(address, method, path, body, kind)
            if status < 500 and status != 429:
                lines = data.splitlines()
                return json.loads(data) if len(lines) == 1 else [json.loads(line) for line in lines]
        except (OSError, asyncio.IncompleteReadError, ValueError):
            pass
        await asyncio.sleep(POLL_S)


async def _exchange(address: tuple[str, int], method: str, path: str, body: bytes, kind: str) -> tuple[int, bytes]:
    reader, writer = await asyncio.open_connection(*address)
    try:
        lines = [f"{method} {path} HTTP/1.1", f"Host: {address[0]}", f"Content-Type: {kind}", "Connection: close"]
        writer.write("\r\n".join([*lines, f"Content-Length: {len(body)}", "", ""]).encode() + body)
        # An engine without power answers no more, and the client has no probes.
        async with asyncio.timeout(30):
            head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").lower().split("\r\n")
            length = next(line for line in head if line.startswith("content-length:"))
            return int(head[0].split(" ")[1]), await reader.readexactly(int(length[15:]))
    finally:
        writer.close()
