"""A progress bar over answers of an engine in this process, with tokens a second from the first token on."""

import time
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from typing import TypeVar

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

REFRESH_S = 0.5
T = TypeVar("T")


def follow(futures: "Sequence[Future[T]]", generated_tokens: Callable[[], int]) -> list[T]:
    """Wait for all answers and return them, with a bar on standard error if that is a terminal.

    Raises the error of the first one that fails. The rate is that of `generated_tokens`, the output tokens that the
    engine has made so far, so it moves before the first answer is complete.
    """
    console = Console(stderr=True)
    if not console.is_terminal:
        return [future.result() for future in futures]
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[rate]:.0f} tokens/s"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("answering", total=len(futures), rate=0.0)
        begin_s, before = time.monotonic(), generated_tokens()
        pending = set(futures)
        while pending:
            done, pending = wait(pending, REFRESH_S, FIRST_COMPLETED)
            for future in done:
                future.result()
            tokens = generated_tokens() - before
            rate = tokens / max(time.monotonic() - begin_s, 1e-3)
            bar.update(task, completed=len(futures) - len(pending), rate=rate)
    return [future.result() for future in futures]
