"""Programs: functions over a state, run once, in batches or as streams."""

import functools
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from tokenyard.lang.interpreter import ProgramState
from tokenyard.lang.values import BaseBackend

MAX_THREADS = 64
"""Threads that run the bodies of a batch's programs. A body that only adds to its state is through at once, so that far
more programs run than there are threads."""

default_backends: list[BaseBackend] = []


def set_default_backend(backend: BaseBackend) -> None:
    """Set the back end of programs that are run without one."""
    default_backends[:] = [backend]


class Program:
    """A function whose first argument is a `ProgramState` (SGLang's `SglFunction`)."""

    def __init__(self, body: Callable[..., Any], bound: dict[str, Any] | None = None) -> None:
        self._body = body
        self._bound = bound or {}
        functools.update_wrapper(self, body)

    def bind(self, **arguments: Any) -> "Program":
        """A program with some arguments already bound."""
        return Program(self._body, {**self._bound, **arguments})

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        """Run the program. With a state as first argument, run only the body, as a part of another program."""
        if arguments and isinstance(arguments[0], ProgramState):
            return self._body(*arguments, **{**self._bound, **named})
        return self.run(*arguments, **named)

    def run(
        self,
        *arguments: Any,
        backend: BaseBackend | None = None,
        stream: bool = False,
        max_new_tokens: int | None = None,
        stop: str | list[str] | None = None,
        temperature: float | None = None,
        top_p: float | None = None,
        top_k: int | None = None,
        frequency_penalty: float | None = None,
        presence_penalty: float | None = None,
        ignore_eos: bool | None = None,
        **named: Any,
    ) -> ProgramState:
        """Run the program and return its state.

        The sampling parameters are defaults for all generations. With `stream` it returns immediately, and `text_iter`
        yields the text. Raises the error of a generation that fails, and RuntimeError without a back end.
        """
        wishes = {
            "max_new_tokens": max_new_tokens,
            "stop": stop,
            "temperature": temperature,
            "top_p": top_p,
            "top_k": top_k,
            "frequency_penalty": frequency_penalty,
            "presence_penalty": presence_penalty,
            "ignore_eos": ignore_eos,
        }
        state = ProgramState(_chosen(backend), {name: value for name, value in wishes.items() if value is not None})
        if stream:
            work = functools.partial(self._run_body, state, arguments, named, quiet=True)
            threading.Thread(target=work, daemon=True).start()
        else:
            self._run_body(state, arguments, named)
        return state

    def run_batch(
        self,
        batch: Sequence[dict[str, Any]],
        *,
        backend: BaseBackend | None = None,
        num_threads: int | str = "auto",
        progress_bar: bool = False,
        generator_style: bool = False,
        **wishes: Any,
    ) -> Any:
        """Run the program concurrently for each dict of arguments; returns the states in the same order.

        Raises the error of the first program, in this order, that failed. With `generator_style` each state is yielded
        as soon as it and those before it are done.
        """
        states = self._run_all(batch, backend, num_threads, progress_bar, wishes)
        return states if generator_style else list(states)

    def _run_all(
        self,
        batch: Sequence[dict[str, Any]],
        backend: BaseBackend | None,
        num_threads: int | str,
        progress_bar: bool,
        wishes: dict[str, Any],
    ) -> Iterator[ProgramState]:
        threads = MAX_THREADS if num_threads == "auto" else int(num_threads)
        chosen = _chosen(backend)
        with ThreadPoolExecutor(max(1, min(threads, len(batch)))) as pool:

            def begin(arguments: dict[str, Any]) -> ProgramState:
                defaults = {name: value for name, value in wishes.items() if value is not None}
                state = ProgramState(chosen, defaults)
                try:
                    self._body(state, **{**self._bound, **arguments})
                except BaseException as error:
                    state.end(error)
                return state

            begun = [pool.submit(begin, arguments) for arguments in batch]
            for done, future in enumerate(begun, 1):
                state = future.result()
                state.sync()
                if state.error is not None:
                    raise state.error
                state.end()
                if progress_bar:
                    print(f"\r{done}/{len(batch)}", end="" if done < len(batch) else "\n", flush=True)
                yield state

    def _run_body(
        self, state: ProgramState, arguments: tuple[Any, ...], named: dict[str, Any], *, quiet: bool = False
    ) -> None:
        """Run the body and wait for its generations. With `quiet` an error is raised only when the state is read."""
        try:
            self._body(state, *arguments, **{**self._bound, **named})
            state.sync()
        except BaseException as error:
            state.end(error)
            if not quiet:
                raise
        else:
            state.end()


def function(body: Callable[..., Any]) -> Program:
    """Decorator that turns a function into a `Program`."""
    return Program(body)


def _chosen(backend: BaseBackend | None) -> BaseBackend:
    if backend is not None:
        return backend
    if not default_backends:
        raise RuntimeError("there is no back end: give one, or call set_default_backend first")
    return default_backends[0]
