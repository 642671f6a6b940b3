"""The numbers of a run; the keys are those of SGLang's result files."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from tokenyard.base import ConfigError
from tokenyard.bench.backends import RequestFuncOutput
from tokenyard.bench.load_generator import BenchResult

PERCENTILES = (90, 95, 99)
MS = 1000.0


def tpot_s(answer: RequestFuncOutput) -> float | None:
    """Mean time of a token after the first, in seconds; None for an answer of one token."""
    if answer.output_tokens < 2:
        return None
    return (answer.latency_s - answer.ttft_s) / (answer.output_tokens - 1)


_MEASURES: dict[str, Callable[[RequestFuncOutput], float | None]] = {
    "ttft": lambda answer: answer.ttft_s,
    "tpot": tpot_s,
    "e2el": lambda answer: answer.latency_s,
}


@dataclass(frozen=True, slots=True)
class Targets:
    """Most milliseconds to the first token, per further token and to the end, by name; an absent name sets none."""

    max_ms: Mapping[str, float]

    @classmethod
    def parse(cls, text: str) -> "Targets":
        """Targets like `ttft:500,tpot:50,e2el:10000` (ms). Raises ConfigError."""
        most: dict[str, float] = {}
        for word in text.replace(",", " ").split():
            name, _, value = word.partition(":")
            try:
                most[name] = float(value)
            except ValueError:
                raise ConfigError(f"--goodput: {word!r} is not of the form name:milliseconds") from None
            if name not in _MEASURES or not most[name] > 0.0:
                raise ConfigError(f"--goodput: {word!r}; names are {', '.join(_MEASURES)}, milliseconds are above 0")
        if not most:
            raise ConfigError("--goodput needs at least one name:milliseconds")
        return cls(most)

    def beyond(self, name: str, answer: RequestFuncOutput) -> bool:
        """Whether a complete answer missed the target `name`."""
        time = None if answer.error else _MEASURES[name](answer)
        return time is not None and time * MS > self.max_ms[name]

    def met(self, answer: RequestFuncOutput) -> bool:
        """Whether an answer is complete and met all targets."""
        return not answer.error and not any(self.beyond(name, answer) for name in self.max_ms)

    def __str__(self) -> str:
        return " ".join(f"{name}:{most:g}" for name, most in self.max_ms.items())


def summarize(run: BenchResult, targets: Targets, tokenizer: Tokenizer | None) -> dict[str, Any]:
    """All numbers of a run. Throughputs are per second of its duration; latencies in milliseconds."""
    good = [answer for answer in run.answers if not answer.error]
    inputs, outputs = sum(a.prompt_tokens for a in good), sum(a.output_tokens for a in good)
    seconds = max(run.duration_s, 1e-9)
    numbers: dict[str, Any] = {
        "completed": len(good),
        "failed": len(run.answers) - len(good),
        "duration": run.duration_s,
        "total_input_tokens": inputs,
        "total_output_tokens": outputs,
        "total_output_tokens_retokenized": _retokenized(good, tokenizer),
        "request_throughput": len(good) / seconds,
        "input_throughput": inputs / seconds,
        "output_throughput": outputs / seconds,
        "max_output_tokens_per_s": peak_tokens_per_s(good),
        "max_concurrent_requests": peak_concurrency(run.answers),
        "total_throughput": (inputs + outputs) / seconds,
        "concurrency": sum(a.latency_s for a in good) / seconds,
        "cached_tokens": sum(a.cached_tokens for a in good),
        "goodput_targets": str(targets),
        **goodput(run, targets),
    }
    numbers |= spread("e2e_latency", [a.latency_s for a in good])
    numbers |= spread("ttft", [a.ttft_s for a in good])
    numbers |= spread("tpot", [time for a in good if (time := tpot_s(a)) is not None])
    numbers |= spread("itl", [gap for a in good for gap in a.gaps_s], with_max=True)
    numbers |= spread("send_delay", [a.late_s for a in run.answers])
    return numbers


def goodput(run: BenchResult, targets: Targets) -> dict[str, Any]:
    """Requests a second that met their targets, and their share of all that were sent; both by class as well."""
    seconds = max(run.duration_s, 1e-9)
    classes = sorted({answer.service_class for answer in run.answers} - {""})

    def of(answers: Sequence[RequestFuncOutput]) -> dict[str, float]:
        met = sum(map(targets.met, answers))
        return {"request_goodput": met / seconds, "attainment": met / max(len(answers), 1)}

    by_class = {name: of([a for a in run.answers if a.service_class == name]) for name in classes}
    return {**of(run.answers), "goodput_by_class": by_class}


def spread(name: str, seconds: Sequence[float], *, with_max: bool = False) -> dict[str, float]:
    """Mean, median and percentiles in milliseconds, as `mean_NAME_ms` and so on; zeros for no values."""
    values = np.array(seconds, np.float64) * MS if len(seconds) else np.zeros(1)
    numbers = {
        f"mean_{name}_ms": float(values.mean()),
        f"median_{name}_ms": float(np.median(values)),
        f"std_{name}_ms": float(values.std()),
    }
    numbers |= {f"p{at}_{name}_ms": float(np.percentile(values, at)) for at in PERCENTILES}
    return numbers | ({f"max_{name}_ms": float(values.max())} if with_max else {})


def peak_tokens_per_s(answers: Sequence[RequestFuncOutput]) -> float:
    """The most tokens that arrived within one second of the run's clock."""
    arrived = [(a.sent_s + at_s, tokens) for a in answers for at_s, tokens in a.arrivals]
    if not arrived:
        return 0.0
    times, tokens = zip(*arrived, strict=True)
    return float(np.bincount(np.array(times, np.int64), np.array(tokens)).max())


def peak_concurrency(answers: Sequence[RequestFuncOutput]) -> int:
    """The most requests in flight at the same time."""
    edges = [(a.sent_s, 1) for a in answers] + [(a.sent_s + a.latency_s, -1) for a in answers]
    steps = np.cumsum([change for _, change in sorted(edges)])
    return int(steps.max()) if len(steps) else 0


def _retokenized(answers: Sequence[RequestFuncOutput], tokenizer: Tokenizer | None) -> int | None:
    """Tokens of the answers' texts; None without a tokenizer."""
    if tokenizer is None:
        return None
    encodings = tokenizer.encode_batch([answer.text for answer in answers], add_special_tokens=False)
    return sum(len(encoding.ids) for encoding in encodings)
