"""One log line per finished answer: ids and lengths, and the text only with `--log-requests-content`.

As JSON, these lines are a trace for the simulator (`--trace-format tokenyard-log`). `complete` is false for an answer
that was refused or aborted, whose `output_tokens` is not its full length. `max_new_tokens` is null if the client gave
no limit.
"""

import logging
from typing import Any

from tokenyard.base import NS_PER_MS, Finish
from tokenyard.base.log_format import quoted_word
from tokenyard.engine.frontend.io_struct import GenerateReqInput, OutputDelta
from tokenyard.server.http.prompt_history import PromptHistory
from tokenyard.server.native.explain import wall_s

log = logging.getLogger("tokenyard.requests")

MS_PER_S = 1000
MAX_LOGGED_CHARS = 2000
"""Prompts and answers are cut at this length."""


class RequestLog:
    """Logs the answers of one request, with `content` also the beginning of prompt and answer."""

    def __init__(self, spec: GenerateReqInput, *, content: bool, prompts: PromptHistory) -> None:
        self._spec = spec
        self._prompts = prompts
        self._content = content
        self._texts: dict[int, str] = {}

    def delta(self, delta: OutputDelta) -> None:
        """Collect text; the last delta of an answer writes its line."""
        if self._content:
            text = self._texts.get(delta.index, "")
            if len(text) < MAX_LOGGED_CHARS:
                self._texts[delta.index] = text + delta.text
        if delta.finish is not None:
            self._write(delta.index, delta.finish)

    def _write(self, index: int, finish: Finish) -> None:
        fields: dict[str, Any] = {
            "rid": self._spec.rid,
            "index": index,
            "reason": finish.reason,
            "cause": finish.cause,
            "complete": finish.complete,
            "prompt_tokens": finish.prompt_tokens,
            "output_tokens": finish.completion_tokens,
            "cached_tokens": finish.cached_tokens,
            "max_new_tokens": None if self._spec.clamp_max_new_tokens else self._spec.sampling.max_new_tokens,
            "queue_ms": round(finish.timings.queue_ns / NS_PER_MS, 1),
            "e2e_ms": round((finish.finished_ns - finish.arrival_ns) / NS_PER_MS, 1),
            "arrival_s": wall_s(finish.arrival_ns),
            "class": self._spec.service_class,
            "priority": self._spec.priority,
            "weights": finish.weight_version or None,
            "weight_runs": ",".join(f"{version or 'default'}:{tokens}" for version, tokens in finish.weight_runs),
            "deadline_s": None if self._spec.deadline_ms is None else self._spec.deadline_ms / MS_PER_S,
        }
        if self._spec.session:
            fields |= {"session": self._spec.session, "turn": self._spec.turn}
            if (report := self._prompts.report(self._spec.rid)) is not None:
                report = report.with_evicted(finish.timings)
                fields |= {"cache": report.cause, "changed": report.part, "how": report.how}
        if self._content:
            prompt = self._spec.text if self._spec.text is not None else f"{finish.prompt_tokens} token ids"
            fields |= {"prompt": prompt[:MAX_LOGGED_CHARS], "output": self._texts.get(index, "")[:MAX_LOGGED_CHARS]}
        words = " ".join(f"{name}={quoted_word(value)}" for name, value in fields.items() if value not in ("", None))
        log.info("Finish: %s", words, extra={"fields": fields})
