"""Finding the largest load that still meets a target."""

from collections.abc import Callable

from tokenyard.base import ConfigError

MAX_DOUBLINGS = 12


def largest_scale(meets: Callable[[float], bool], start: float = 1.0, tolerance: float = 0.01) -> float:
    """The largest rate scale for which `meets` holds, within a relative `tolerance`; 0 if not even a tiny one does.

    `meets` must hold below the answer and fail above it. First the answer is bracketed by doubling or halving `start`,
    then bisected. Raises ConfigError if no bracket is found within `MAX_DOUBLINGS` doublings upwards.
    """
    low, high = 0.0, start
    if meets(start):
        low, high = _double(meets, start)
    else:
        for _ in range(MAX_DOUBLINGS):
            if meets(high / 2):
                low = high / 2
                break
            high /= 2
        if low == 0.0:
            return 0.0
    while high - low > tolerance * low:
        middle = (low + high) / 2
        low, high = (middle, high) if meets(middle) else (low, middle)
    return low


def _double(meets: Callable[[float], bool], start: float) -> tuple[float, float]:
    scale = start
    for _ in range(MAX_DOUBLINGS):
        if not meets(2 * scale):
            return scale, 2 * scale
        scale *= 2
    raise ConfigError(f"the target is met even at {scale:g} times the trace's rate; is the trace long enough to tell?")
