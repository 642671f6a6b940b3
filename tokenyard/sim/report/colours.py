"""One colour per setting, the same on every page: known names have theirs, others keep one by a hash of their name."""

from collections.abc import Sequence
from zlib import crc32

SLOTS = 16
"""Colours of the pages' theme, `--s1` to `--s16`."""

_KNOWN = (
    *("fcfs", "slo", "lpm", "priority", "edf", "short-first", "vtc", "dlpm"),
    *("adaptive", "mlfq", "hrrn", "dfs-weight", "lof", "random", "sglang-default", "vllm-default"),
)
PARTS = {
    **{"waiting": "s3", "running": "s1", "prefill": "s1", "decode": "s2", "held": "s1", "step": "s1"},
    **{"on the tape": "ink-2", "measured": "s1", "simulated": "s1", "what if": "s3"},
}
"""Colours of what is no setting, as on the live page."""

PLAIN = "muted"
"""Bounds and targets."""


def colours_of(names: Sequence[str]) -> dict[str, str]:
    """The theme's colour of each setting. Two settings of one page share none while there are enough."""
    found = {name: PARTS[name] for name in names if name in PARTS}
    wanted = {name: _KNOWN.index(name) if name in _KNOWN else crc32(name.encode()) % SLOTS for name in names}
    taken: set[int] = set()
    # Known names first, so that a name by chance does not take the colour of one.
    for name in sorted(set(names) - found.keys(), key=lambda name: (name not in _KNOWN, names.index(name))):
        place = next((one for one in _from(wanted[name]) if one not in taken), wanted[name])
        taken.add(place)
        found[name] = f"s{place + 1}"
    return found


def _from(place: int) -> list[int]:
    return [(place + step) % SLOTS for step in range(SLOTS)]
