"""A file of answers to the lines of an input that a run continues and never destroys.

Answers are appended to FILE.partial as they come. When all are there, they are written in the order of the input and
renamed to FILE. A run that finds FILE or FILE.partial keeps their answers.
"""

import hashlib
import json
import os
import threading
from collections import defaultdict, deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TextIO

from tokenyard.base import ConfigError

Record = dict[str, Any]


def key_of(record: Record) -> str:
    """What a line of an input and its answer have in common: the id of a batch line, or the prompt."""
    for name in ("custom_id", "messages", "prompt"):
        if name in record:
            return json.dumps([name, record[name]], sort_keys=True, ensure_ascii=False)
    return ""


class AnswerFile:
    """Answers by their place in the input. Thread-safe.

    lines: what each line asks; `key_of` of a line equals that of its answer.
    options: what else decides the answers, such as the model; answers in FILE.partial with others do not count.

    Raises ConfigError if the file cannot be written.
    """

    def __init__(self, path: str, lines: Sequence[Record], options: Any) -> None:
        self._path = Path(path)
        self._partial = Path(f"{path}.partial")
        self._lock = threading.Lock()
        self._digests = [_digest(line, options) for line in lines]
        self.answers: dict[int, str] = {}
        self._has_others = False
        try:
            kept = self._from_whole(lines) | self._from_partial()
            self._open: TextIO = self._partial.open("a", encoding="utf-8")
            # A line that a crash cut must not merge with the next one.
            if self._partial.stat().st_size:
                self._open.write("\n")
        except (OSError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else error
            raise ConfigError(f"--output {path} cannot be written: {reason}") from error
        self.answers = kept

    @property
    def missing(self) -> list[int]:
        """Places of the lines without an answer."""
        return [place for place in range(len(self._digests)) if place not in self.answers]

    def _from_whole(self, lines: Sequence[Record]) -> dict[int, str]:
        """Answers in the finished file of an earlier run, or in one that a run of an older version left."""
        if not self._path.exists():
            return {}
        places: dict[str, deque[int]] = defaultdict(deque)
        for place, line in enumerate(lines):
            places[key_of(line)].append(place)
        found = {}
        for text in self._path.read_text(encoding="utf-8").splitlines():
            record = _object(text)
            wanted = places.get(key_of(record)) if record else None
            self._has_others |= bool(record) and not wanted
            if wanted:
                place = wanted.popleft()
                if not _failed(record):
                    found[place] = text
        return found

    def _from_partial(self) -> dict[int, str]:
        """Answers that an interrupted run left."""
        if not self._partial.exists():
            return {}
        places: dict[str, deque[int]] = defaultdict(deque)
        for place, digest in enumerate(self._digests):
            places[digest].append(place)
        found = {}
        for text in self._partial.read_text(encoding="utf-8", errors="replace").splitlines():
            record = _object(text)
            wanted = places.get(str(record.get("of")))
            if wanted and isinstance(record.get("answer"), dict):
                found[wanted.popleft()] = json.dumps(record["answer"], ensure_ascii=False)
        return found

    def add(self, place: int, answer: Record) -> None:
        """Keep the answer to a line. One that failed is in the file, but the next run asks again."""
        with self._lock:
            self.answers[place] = json.dumps(answer, ensure_ascii=False)
            if not _failed(answer) and not self._open.closed:
                line = {"of": self._digests[place], "answer": answer}
                self._open.write(json.dumps(line, ensure_ascii=False) + "\n")
                self._open.flush()

    def finish(self) -> None:
        """Write all answers in order. A file that had answers to something else is renamed to FILE.old."""
        whole = self._path.with_name(f"{self._path.name}.new")
        with whole.open("w", encoding="utf-8") as output:
            output.writelines(self.answers[place] + "\n" for place in sorted(self.answers))
            output.flush()
            os.fsync(output.fileno())
        if self._has_others:
            os.replace(self._path, f"{self._path}.old")
        os.replace(whole, self._path)
        self.close()
        self._partial.unlink(missing_ok=True)

    def close(self) -> None:
        """Close FILE.partial, and delete it if it is empty."""
        with self._lock:
            self._open.close()
        if self._partial.exists() and not self._partial.stat().st_size:
            self._partial.unlink()


def _digest(line: Record, options: Any) -> str:
    text = json.dumps([line, options], sort_keys=True, ensure_ascii=False, default=str)
    return hashlib.blake2b(text.encode("utf-8", "replace"), digest_size=16).hexdigest()


def _object(text: str) -> Record:
    """The object on a line, {} for a line that is none, as a crash may have cut it."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def _failed(record: Record) -> bool:
    """Whether a line of a batch failed."""
    response = record.get("response")
    return isinstance(response, dict) and response.get("status_code", 200) >= 400
