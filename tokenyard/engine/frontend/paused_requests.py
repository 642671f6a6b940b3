"""Records of paused requests on disk, so that one can be resumed after the engine was killed or started again.

Each paused request has a file next to the KV store (`--hicache-storage-dir`) with the request and the tokens of its
answers so far. Sampling is keyed by seed and position, so that what is resumed from a record goes on with
the same tokens. A file begins with a header (magic, version, lengths, digest of the rest); it is written under another
name first, so that there is never half a record under its own.
"""

import asyncio
import contextlib
import itertools
import logging
import os
import struct
from collections.abc import Collection
from dataclasses import dataclass, fields, replace
from hashlib import blake2b
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from tokenyard.base import NS_PER_MS, LogprobOptions, SamplingParams, Slo, TextOptions, TokenyardError
from tokenyard.base.decode_errors import DECODE_ERRORS
from tokenyard.base.request import adapter_name
from tokenyard.engine.frontend.io_struct import GenerateReqInput
from tokenyard.engine.frontend.streams import Stream

logger = logging.getLogger(__name__)

MAGIC, VERSION = b"TYPAUSED", 1
HEAD = struct.Struct("<8sIIQ16s")
"""Magic, version, bytes of the request's id, bytes of the record behind it, digest of both."""
MAX_RECORDS = 1024
"""Beyond this, the oldest record is removed."""
MAX_ID_BYTES = 1 << 16


class PausedAnswer(msgspec.Struct):
    """One answer of a paused request.

    index: its index among the answers of the request.
    output: its output tokens, int32 as bytes.
    shown: how many of them the client has.
    """

    index: int
    output: bytes
    shown: int


class PausedRequest(msgspec.Struct):
    """A paused request as its record has it; the fields without a line are those of `Request`.

    model: the digest of the weights that computed its answers.
    prompt: int32 as bytes.
    lora: name and digest of its adapter.
    """

    rid: str
    model: str
    prompt: bytes
    sampling: SamplingParams
    text: TextOptions
    answers: list[PausedAnswer]
    logprobs: LogprobOptions | None = None
    priority: int | None = None
    service_class: str | None = None
    tenant: str = ""
    deadline_ms: float | None = None
    slo: Slo | None = None
    cache_salt: str = ""
    lora: str = ""
    routing_key: str | None = None
    grammar: str = ""


@dataclass(slots=True)
class PausedCounters:
    """Totals of records since the start.

    kept: records written.
    resumed: requests resumed from a record.
    displaced: oldest records removed beyond the limit.
    unusable: damaged records, or records of another model or a newer version.
    failed: writes that failed.
    """

    kept: int = 0
    resumed: int = 0
    displaced: int = 0
    unusable: int = 0
    failed: int = 0


def record_of(stream: Stream, outputs: dict[int, list[int]], model: str) -> PausedRequest | None:
    """The record of a request whose open answers have these output tokens, by number; None if there are none."""
    request = stream.request
    answers = [
        PausedAnswer(index, _bytes(outputs[stream.number + index]), stream.shown + len(stream.tokens[index]))
        for index in sorted(stream.open_answers)
        if stream.number + index in outputs
    ]
    if not answers or request.pooling:
        return None
    return PausedRequest(
        rid=request.rid,
        model=model,
        prompt=_bytes(request.prompt_ids),
        sampling=request.sampling,
        text=request.text,
        answers=answers,
        logprobs=request.logprobs,
        priority=request.priority,
        service_class=request.service_class,
        tenant=request.tenant,
        deadline_ms=None if request.deadline_ns is None else request.deadline_ns / NS_PER_MS,
        slo=request.slo,
        cache_salt=request.cache_salt,
        lora=request.lora,
        routing_key=request.routing_key,
        grammar=request.grammar,
    )


def specs_of(record: PausedRequest) -> list[GenerateReqInput]:
    """What is to be generated to bring the answers of a record to their end, one entry per answer."""
    alone = len(record.answers) == 1
    return [_spec(record, answer, record.rid if alone else f"{record.rid}-{answer.index}") for answer in record.answers]


def _spec(record: PausedRequest, answer: PausedAnswer, rid: str) -> GenerateReqInput:
    output, logprobs = np.frombuffer(answer.output, np.int32), record.logprobs
    shown = min(answer.shown, len(output))
    if logprobs is not None:
        # Log-probabilities of tokens that the client has not seen are found by computing them again.
        output = output[:shown]
        logprobs = replace(logprobs, prompt_from=-1) if shown else logprobs
    seed = record.sampling.seed + answer.index
    return GenerateReqInput(
        input_ids=np.frombuffer(record.prompt, np.int32),
        sampling=replace(record.sampling, n=1),
        text_options=replace(record.text, shown=shown),
        logprobs=logprobs,
        seed=seed,
        rid=rid,
        priority=record.priority,
        service_class=record.service_class,
        tenant=record.tenant,
        deadline_ms=record.deadline_ms,
        slo=record.slo,
        cache_salt=record.cache_salt,
        lora=adapter_name(record.lora),
        routing_key=record.routing_key,
        grammar=record.grammar,
        output_ids=output,
    )


class PausedRequests:
    """The records in one folder, for an engine whose model has this digest. Used from one event loop."""

    def __init__(self, folder: str, model: str) -> None:
        """Reads the folder; unusable records are counted, logged and left in place."""
        self.counters = PausedCounters()
        self._folder = Path(folder)
        self._model = model
        self._paths: dict[str, Path] = {}
        self._writing = asyncio.Lock()
        self._names = itertools.count()
        for path in sorted(self._folder.glob("*.paused"), key=_age):
            try:
                self._paths[_read_id(path)] = path
            except (OSError, ValueError) as error:
                self._unusable(path, str(error))
        for left in self._folder.glob("*.tmp"):
            _remove(left)

    @property
    def rids(self) -> Collection[str]:
        """The ids of the requests that have a record, oldest first."""
        return self._paths.keys()

    async def keep(self, stream: Stream, outputs: dict[int, list[int]]) -> None:
        """Write the record of a paused request. A failure is logged and counted; the request stays paused."""
        async with self._writing:
            if stream.rid.rpartition("-")[0] in self._paths:
                # One of several answers that are being resumed from their record, which is still good.
                return
            record = record_of(stream, outputs, self._model) if stream.paused else None
            if record is None:
                return
            path = self._folder / f"{blake2b(record.rid.encode(), digest_size=16).hexdigest()}.paused"
            try:
                await asyncio.to_thread(self._write, path, encode(record))
            except (OSError, ValueError) as error:
                self.counters.failed += 1
                logger.warning("the paused request %s has no record: %s", record.rid, error)
                return
            self._paths.pop(record.rid, None)
            self._paths[record.rid] = path
            self.counters.kept += 1
            if not (stream.paused and stream.open_answers):
                self.forget(record.rid)
            if len(self._paths) > MAX_RECORDS:
                self.counters.displaced += 1
                self.forget(next(iter(self._paths)))

    def _write(self, path: Path, data: bytes) -> None:
        self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        new = self._folder / f"{os.getpid()}-{next(self._names)}.tmp"
        try:
            with os.fdopen(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            new.replace(path)
        except OSError:
            _remove(new)
            raise

    async def specs(self, rid: str, adapters: Collection[str] = ()) -> list[GenerateReqInput]:
        """The requests that continue the answers of a recorded request that is no longer open, one per answer.

        `adapters` are the loaded ones, as `Request.lora` names them. Raises TokenyardError (request_not_found) for a
        request without a record, or with one that cannot be used here.
        """
        record = await self._load(rid)
        if record.lora and record.lora not in adapters:
            name = adapter_name(record.lora)
            message = f"request {rid!r} cannot be resumed: its adapter {name!r} is not loaded, or of other files"
            raise TokenyardError(message, code="request_not_found")
        return specs_of(record)

    async def _load(self, rid: str) -> PausedRequest:
        path = self._paths.get(rid)
        try:
            if path is None:
                raise ValueError("it was resumed, or never paused")
            record = decode(await asyncio.to_thread(path.read_bytes))
            if record.model != self._model:
                raise ValueError(f"it is of another model (weights {record.model}, here {self._model})")
        except (OSError, ValueError) as error:
            if path is not None:
                self._unusable(path, str(error))
            message = f"request {rid!r} cannot be resumed: {error}"
            raise TokenyardError(message, code="request_not_found") from error
        return record

    def forget(self, rid: str, *, resumed: bool = False) -> None:
        """Remove the record of a request, if it has one."""
        path = self._paths.pop(rid, None)
        if path is not None:
            _remove(path)
            self.counters.resumed += resumed

    def describe(self) -> dict[str, Any]:
        """Counters for `/v1/cache`."""
        return {"records": len(self._paths)} | {f.name: getattr(self.counters, f.name) for f in fields(self.counters)}

    def _unusable(self, path: Path, why: str) -> None:
        self.counters.unusable += 1
        logger.warning("the record %s of a paused request cannot be used: %s", path, why)


def encode(record: PausedRequest) -> bytes:
    """A record as the bytes of its file. Raises ValueError for an id that is too long."""
    rid, body = record.rid.encode(), msgspec.msgpack.encode(record)
    if len(rid) > MAX_ID_BYTES:
        raise ValueError("its id is too long")
    return HEAD.pack(MAGIC, VERSION, len(rid), len(body), _digest(rid + body)) + rid + body


def decode(data: bytes) -> PausedRequest:
    """The record in the bytes of a file. Raises ValueError, which says why, for one that is damaged or newer."""
    id_bytes, body_bytes, digest = _parse_head(data)
    rest = data[HEAD.size :]
    if len(rest) != id_bytes + body_bytes or _digest(rest) != digest:
        raise ValueError("its record is damaged")
    try:
        record = msgspec.msgpack.decode(rest[id_bytes:], type=PausedRequest)
    except DECODE_ERRORS as error:
        raise ValueError(f"its record does not decode: {error}") from error
    if any(len(ids) % np.int32().itemsize for ids in (record.prompt, *(answer.output for answer in record.answers))):
        raise ValueError("its record has half a token")
    return record


def _read_id(path: Path) -> str:
    """The id of the request in a file, without its record. Raises OSError and ValueError."""
    with path.open("rb") as file:
        id_bytes, body_bytes, _ = _parse_head(file.read(HEAD.size))
        rid = file.read(id_bytes)
    if path.stat().st_size != HEAD.size + id_bytes + body_bytes:
        raise ValueError("it is cut short or too long")
    return rid.decode()


def _parse_head(data: bytes) -> tuple[int, int, bytes]:
    """Bytes of id and record, and their digest."""
    if len(data) < HEAD.size:
        raise ValueError("its record is cut short")
    magic, version, id_bytes, body_bytes, digest = HEAD.unpack_from(data)
    if magic != MAGIC or id_bytes > MAX_ID_BYTES:
        raise ValueError("this is no record of a paused request")
    if version > VERSION:
        raise ValueError(f"its record is of version {version}, and this is version {VERSION}")
    return id_bytes, body_bytes, digest


def _bytes(ids: Any) -> bytes:
    return np.asarray(ids, np.int32).tobytes()


def _digest(data: bytes) -> bytes:
    return blake2b(data, digest_size=16).digest()


def _age(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0


def _remove(path: Path) -> None:
    with contextlib.suppress(OSError):
        path.unlink()
