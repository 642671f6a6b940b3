"""Lays out what `tokenyard top` shows as lines of text."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from tokenyard.base.percent import percent

BLOCKS = " ▁▂▃▄▅▆▇█"
PER_SECOND = 4
MIN_WIDTH = 60
MAX_ROWS = 10
PREFILL, DECODE, STEPS, BUSY = 2, 3, 1, 4


class LiveStateView(Protocol):
    """The part of `cli.top.LiveState` that the layout reads."""

    server: Mapping[str, Any]
    tick: Mapping[str, Any]
    prefixes: list[Mapping[str, Any]]
    bins: dict[int, list[float]]

    @property
    def totals(self) -> Sequence[Mapping[str, Any]]:
        """Events of the last minute, oldest first."""


def screen(seen: LiveStateView, columns: int, lines: int | None) -> list[str]:
    """The lines for a terminal of `columns` x `lines` (None for no limit), each at most `columns` wide."""
    width, tick = max(columns, MIN_WIDTH), seen.tick
    found = [_title(seen)]
    if "counts" not in tick:
        found.append(tick.get("why") or f"the server is {tick.get('phase', 'not there')}")
    else:
        found += ["", *_now(seen), "", *_classes(seen, width), "", *_minute(seen, width), "", *_rows(seen, width)]
    return [line[: max(columns, 1)] for line in (found if lines is None else found[:lines])]


def _title(seen: LiveStateView) -> str:
    tick = seen.tick
    parts = [f"Tokenyard {seen.server.get('version', '')}", str(seen.server.get("model", "")), tick.get("phase", "")]
    parts += [f"policy {tick['policy']}"] if tick.get("policy") else []
    parts += ["paused"] if tick.get("paused") else []
    return "  ".join(part for part in parts if part)


def _growth(seen: LiveStateView, read: Callable[[Mapping[str, Any]], float]) -> tuple[float, float]:
    """How much a total has grown in the last minute, and in how many seconds."""
    first, last = seen.totals[0], seen.totals[-1]
    return read(last) - read(first), last["at"] - first["at"]


def _per_second(seen: LiveStateView, read: Callable[[Mapping[str, Any]], float]) -> float:
    amount, seconds = _growth(seen, read)
    return amount / seconds if seconds > 0 else 0.0


def _now(seen: LiveStateView) -> list[str]:
    tick = seen.tick
    counts, kv = tick["counts"], tick["kv"]
    placed = counts["running"] + counts["prefilling"] + counts["loading"]
    asked, _ = _growth(seen, lambda one: one["totals"]["prompt_tokens"])
    hit, _ = _growth(seen, lambda one: one["totals"]["hit_tokens"])
    output = _per_second(seen, lambda one: one["totals"]["generated_tokens"])
    goodput = _per_second(seen, lambda one: sum(one["goodput"].values()))
    used = kv["rows"] + kv["shared"] + kv["held"]
    error = tick.get("step_time_error")
    return [
        f"running {placed} ({counts['prefilling']} in prefill)   waiting {counts['waiting']}   "
        f"output {output:.0f} tok/s   goodput {goodput:.0f} tok/s   cache hits {_share(hit, asked)}",
        f"KV {_share(used, kv['total'])} in use, {_share(kv['cached'], kv['total'])} cached, of {kv['total']} tokens   "
        f"cost model error {'unknown' if error is None else f'{100 * error:.1f} %'}",
    ]


def _share(part: float, whole: float) -> str:
    return f"{percent(part / whole)} %" if whole else "-"


def _classes(seen: LiveStateView, width: int) -> list[str]:
    """A line for each class that has requests or results: counts, a bar, and whether its targets were met."""
    tick, levels = seen.tick, list(seen.server.get("levels", ()))
    waiting: Counter[str] = Counter()
    placed: Counter[str] = Counter()
    for state, level, _, requests, *_ in tick["groups"]:
        (waiting if state == "waiting" else placed)[levels[level]] += requests
    most = max([1, *((waiting + placed).values())])
    room = max(width - 62, 8)
    lines = [f"{'class':<8}{'running':>8}{'waiting':>8}  {'':<{room}}  {'met, 60 s':>10}{'of':>8}{'met, all':>10}"]
    for level in levels:
        met, missed = tick["slo"][level]
        if not (waiting[level] or placed[level] or met or missed):
            continue
        lately = [_growth(seen, lambda one, place=place, name=level: one["slo"][name][place])[0] for place in (0, 1)]  # type: ignore[misc]
        bar = "█" * round(room * placed[level] / most) + "░" * round(room * waiting[level] / most)
        lines.append(
            f"{level:<8}{placed[level]:>8}{waiting[level]:>8}  {bar[:room]:<{room}}  "
            f"{_share(lately[0], sum(lately)):>10}{sum(lately):>8.0f}{_share(met, met + missed):>10}"
        )
    return lines


def _minute(seen: LiveStateView, width: int) -> list[str]:
    """The steps of the last minute as sparklines."""
    cells = min(60, max(width - 42, 10))
    now = seen.tick["now"]
    each = max(1, 60 * PER_SECOND // cells)
    groups = [
        [seen.bins.get(index) for index in range(end - each, end)] for end in range(now, now - each * cells, -each)
    ]
    groups.reverse()

    def rate(column: int) -> list[float]:
        return [sum(one[column] for one in group if one) * PER_SECOND / each for group in groups]

    def step_ms(group: list[list[float] | None]) -> float:
        steps = sum(one[STEPS] for one in group if one)
        return sum(one[BUSY] for one in group if one) / steps if steps else 0.0

    curves = {
        "decode tok/s": rate(DECODE),
        "prefill tok/s": rate(PREFILL),
        "step time ms": [step_ms(g) for g in groups],
    }
    return [
        f"{name:<14}{_spark(values)}  now {values[-1]:.4g}, most {max(values):.4g}" for name, values in curves.items()
    ]


def _spark(values: Sequence[float]) -> str:
    most = max(values) or 1.0
    return "".join(BLOCKS[min(8, -(-int(1000 * 8 * value / most) // 1000))] for value in values)


def _rows(seen: LiveStateView, width: int) -> list[str]:
    """The oldest requests, and the prefixes that saved most."""
    rows = seen.tick["rows"]
    lines = []
    if rows:
        lines.append(
            f"{'request':<34}{'state':<9}{'age':>9}{'prompt':>8}{'cached':>8}{'written':>9}{'limit':>7}  tenant"
        )
    for rid, state, _, tenant, age, prompt, hit, _, known, limit, paused in sorted(rows, key=lambda row: -row[4])[
        :MAX_ROWS
    ]:
        word = "paused" if paused else state
        lines.append(
            f"{rid[:32]:<34}{word:<9}{age / 1000:>8.1f}s{prompt:>8}{hit:>8}{known - prompt:>9}{limit:>7}  {tenant}"
        )
    if seen.prefixes:
        saved = [f"{one['hits']} x {one['tokens']} tokens{' *' if one['in_use'] else ''}" for one in seen.prefixes[:5]]
        lines += ["", "hot prefixes (* in use): " + ", ".join(saved)]
    return [line[:width] for line in lines]
