"""The text side of the engine without its process: tokens in, text and found stop strings out.

The detokenizer process runs this, as does an engine that runs in one process.
"""

from typing import cast

import numpy as np
from tokenizers import Tokenizer

from tokenyard.base import Finish, Int32Array, InvalidRequestError, Started, StopFound, TokenBatch, TokenLogprobs
from tokenyard.engine.detokenizer.incremental import IncrementalDetokenizer
from tokenyard.engine.detokenizer.stop_strings import StopHit, StopMatcher
from tokenyard.engine.processes.messages import Fence, Fenced, TextBatch


class _TextState:
    """One answer between its first token and its end.

    `tokens` are all output tokens so far, of which the first `sent` have gone to the API process. Those that the
    request brought with it count as sent, unless its client lacks some (`TextOptions.shown`): their text precedes the
    first output as `said`.
    """

    __slots__ = (
        "cached_tokens",
        "interval",
        "logprobs",
        "matcher",
        "min_tokens",
        "number",
        "pieces",
        "prompt_tokens",
        "said",
        "sent",
        "sent_once",
        "source",
        "stopped_by",
        "text",
        "tokens",
        "trims_stop",
        "undecoded",
    )

    def __init__(self, started: Started, tokenizer: Tokenizer | None) -> None:
        options = started.text
        self.number = started.number
        self.prompt_tokens = len(started.prompt_ids)
        self.trims_stop = not options.no_stop_trim
        self.interval = max(1, options.stream_interval) if options.stream else 0
        self.text = tokenizer and IncrementalDetokenizer(
            tokenizer, started.prompt_ids, options.skip_special_tokens, options.keep_ids
        )
        self.matcher = StopMatcher(started.stop) if started.stop else None
        self.min_tokens = options.min_tokens
        self.stopped_by: str | None = None
        self.source = 0
        self.cached_tokens = 0
        self.sent_once = False
        self.tokens: list[int] = []
        self.pieces: list[str] = []
        self.undecoded: list[int] = []
        self.logprobs: list[TokenLogprobs] = []
        self.said = ""
        begun = started.output_ids.tolist()
        self.sent = len(begun) if options.shown < 0 else min(options.shown, len(begun))
        for token in begun:
            self.tokens.append(token)
            if self.text is not None and self.stopped_by is None:
                self._show(self.text.add(token))
            if len(self.tokens) == self.sent:
                self.said, self.pieces = "".join(self.pieces), []

    def add(self, token: int, cached_tokens: int) -> bool:
        """Add one token; return whether it completed a stop string."""
        self.cached_tokens = cached_tokens
        self.tokens.append(token)
        if self.text is None:
            return False
        if not self.interval and self.matcher is None:
            self.undecoded.append(token)
            return False
        return self._show(self.text.add(token))

    def drop(self, token: int, cached_tokens: int) -> None:
        """Add the token that stopped the answer and is not shown."""
        self.cached_tokens = cached_tokens
        self.tokens.append(token)

    def due(self) -> bool:
        """Whether a streaming answer has something to send now."""
        if not self.pieces and (self.text is not None or len(self.tokens) == self.sent):
            return False
        return not self.sent_once or len(self.tokens) - self.sent >= self.interval

    def stop_found(self) -> StopFound:
        """The message that reports the found stop string to the scheduler."""
        return StopFound(self.number, len(self.tokens), cast(str, self.stopped_by))

    def finish(self, finish: Finish) -> Finish:
        """Show what was held back; return the finish that the client gets: a found stop string takes precedence."""
        if self.stopped_by is None and self.text is not None:
            for token in self.undecoded:
                self._show(self.text.add(token))
            if not self._show(self.text.flush()) and self.matcher is not None:
                self._show_raw(self.matcher.rest())
        if self.stopped_by is None:
            return finish
        finish.reason, finish.matched = "stop", self.stopped_by
        finish.message, finish.cause = "", ""
        finish.completion_tokens = len(self.tokens)
        return finish

    def take_logprobs(self) -> list[TokenLogprobs]:
        """Return the log-probabilities of the tokens added so far, without those after a found stop string."""
        end = self.prompt_tokens + len(self.tokens)
        found = [entry for entry in self.logprobs if entry.position < end]
        self.logprobs = [entry for entry in self.logprobs if entry.position >= end]
        return found

    def _show(self, piece: str) -> bool:
        """Pass a piece on through the stop strings; return whether one was found."""
        if self.matcher is None or not piece or len(self.tokens) <= self.min_tokens:
            self._show_raw(piece)
            return False
        shown = self.matcher.feed(piece)
        if not isinstance(shown, StopHit):
            self._show_raw(shown)
            return False
        self.stopped_by = shown.matched
        self._show_raw(shown.before if self.trims_stop else shown.before + shown.matched)
        return True

    def _show_raw(self, piece: str) -> None:
        if piece:
            self.pieces.append(piece)


class _Columns:
    """Builds a `TextBatch`."""

    def __init__(self) -> None:
        self.numbers: list[int] = []
        self.texts: list[str] = []
        self.token_counts: list[int] = []
        self.tokens: list[int] = []
        self.completion_tokens: list[int] = []
        self.cached_tokens: list[int] = []
        self.finished: list[Finish] = []
        self.logprobs: list[TokenLogprobs] = []
        self.said: list[tuple[int, str]] = []

    def add(self, answer: _TextState) -> None:
        """Add all unsent output of an answer."""
        self.numbers.append(answer.number)
        self.texts.append("".join(answer.pieces))
        tokens, total = answer.tokens, len(answer.tokens)
        count = total - answer.sent
        self.token_counts.append(count)
        if count == 1:  # as with nearly every answer of a step
            self.tokens.append(tokens[-1])
        else:
            self.tokens += tokens[answer.sent :]
        self.completion_tokens.append(total)
        self.cached_tokens.append(answer.cached_tokens)
        if answer.logprobs:
            self.logprobs += answer.take_logprobs()
        if answer.said:
            self.said.append((answer.number, answer.said))
            answer.said = ""
        answer.pieces, answer.sent, answer.sent_once = [], total, True

    def batch(self) -> TextBatch:
        """Return the message."""
        return TextBatch(
            np.array(self.numbers, dtype=np.int64),
            self.texts,
            _int32(self.token_counts),
            _int32(self.tokens),
            _int32(self.completion_tokens),
            _int32(self.cached_tokens),
            self.finished,
            self.logprobs,
            self.said,
        )


def ends_batch(finished: list[Finish]) -> TextBatch:
    """A message that only reports the ends of answers."""
    return TextBatch(np.empty(0, dtype=np.int64), [], _int32([]), _int32([]), _int32([]), _int32([]), finished)


def _int32(values: list[int]) -> Int32Array:
    return np.array(values, dtype=np.int32)


class TextAssembler:
    """Keeps the state of all answers; without a tokenizer it only regroups token ids.

    An answer that does not stream has no output before its end, and is decoded only then unless it has stop strings.
    """

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self._tokenizer = tokenizer
        self._answers: dict[int, _TextState] = {}

    def __len__(self) -> int:
        return len(self._answers)

    def step(self, batch: TokenBatch, source: int = 0) -> tuple[TextBatch, list[StopFound]]:
        """Handle the output of a step of scheduler process `source`; return messages for the API process and for it.

        Raises InvalidRequestError for stop strings where there is no tokenizer.
        """
        stops = [stop for started in batch.started if (stop := self._start(started, source)) is not None]
        for entry in batch.logprobs:
            if (answer := self._answers.get(entry.number)) is not None:
                answer.logprobs.append(entry)
        columns = _Columns()
        ends = {finish.number: finish for finish in batch.finished}
        stops += self._take_tokens(batch, ends, columns)
        for finish in batch.finished:
            ended = self._answers.pop(finish.number, None)
            if ended is not None:
                finish = ended.finish(finish)
                columns.add(ended)
            columns.finished.append(finish)
        return columns.batch(), stops

    def fence(self, fence: Fence) -> Fenced:
        """Report the output so far of the answers of a scheduler that has ended. They continue when another scheduler
        starts them; its other answers are removed.
        """
        kept = set(fence.numbers)
        for number in [n for n, answer in self._answers.items() if answer.source == fence.source and n not in kept]:
            del self._answers[number]
        begun = [answer for number in fence.numbers if (answer := self._answers.get(number)) is not None]
        return Fenced(
            fence.source,
            np.array([answer.number for answer in begun], dtype=np.int64),
            _int32([len(answer.tokens) for answer in begun]),
            _int32([token for answer in begun for token in answer.tokens]),
        )

    def _start(self, started: Started, source: int) -> StopFound | None:
        """Begin an answer, or continue one whose scheduler has ended; return its stop string if one is found."""
        if self._tokenizer is None and started.stop:
            raise InvalidRequestError("stop strings need a tokenizer; use stop_token_ids", param="stop")
        answer = self._answers.get(started.number)
        if answer is None or not answer.tokens:
            answer = self._answers[started.number] = _TextState(started, self._tokenizer)
        answer.source = source
        return None if answer.stopped_by is None else answer.stop_found()

    def _take_tokens(self, batch: TokenBatch, ends: dict[int, Finish], columns: _Columns) -> list[StopFound]:
        stops = []
        answers = self._answers
        columns_of_batch = (batch.numbers.tolist(), batch.tokens.tolist(), batch.hits.tolist())
        for number, token, hit in zip(*columns_of_batch, strict=True):
            answer = answers.get(number)
            if answer is None or answer.stopped_by is not None:
                continue
            end = ends.get(number)
            if end is not None and _hides(answer, end, token):
                answer.drop(token, hit)
            elif answer.add(token, hit):
                stops.append(answer.stop_found())
            if end is None and answer.interval and answer.due():
                columns.add(answer)
        return stops


def _hides(answer: _TextState, end: Finish, token: int) -> bool:
    """Whether `token` is the stop token that ends the answer and is to be trimmed."""
    last = len(answer.tokens) + 1 == end.completion_tokens
    return last and end.reason == "stop" and end.matched == token and answer.trims_stop
