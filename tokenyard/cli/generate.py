"""`tokenyard generate`: answer prompts in this process, without a server."""

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, TextIO

from tokenyard.base import ConfigError, SamplingParams
from tokenyard.cli.answer_file import AnswerFile
from tokenyard.cli.batch import BatchLine, answer_batch, check_batch_line, check_ids, is_batch_line
from tokenyard.cli.flags import resolve
from tokenyard.engine.processes.logs import set_up_logging
from tokenyard.offline import LLM, Generation, Prompt
from tokenyard.progress import follow

Conversation = list[dict[str, Any]]


def generate(namespace: argparse.Namespace) -> int:
    """Answer the prompt, or every prompt of `--input`, and print the answers or write them to `--output`."""
    settings = resolve(vars(namespace)).settings
    set_up_logging("warning" if settings.log_level == "info" else settings.log_level, settings.log_format)
    batch, inputs = _sorted(list(read_inputs(namespace.prompt, namespace.input)))
    if namespace.input and namespace.output and Path(namespace.output).resolve() == Path(namespace.input).resolve():
        raise ConfigError(f"--output {namespace.output} would overwrite the input; name another file")
    sampling = _sampling(namespace)
    SamplingParams(**sampling).validate()
    with ExitStack() as stack:
        # Open the file first, so that a path that cannot be written fails before the run.
        options = [settings.model_path, None if batch is not None else [sampling, namespace.raw]]
        lines: list[Any] = batch if batch is not None else [_line(item) for item in inputs]
        output = _open_output(stack, namespace.output, lines, options) if namespace.output else None
        if isinstance(output, AnswerFile) and not _say_what_is_kept(output, len(lines), namespace.output):
            return 0
        llm = stack.enter_context(LLM.from_settings(settings))
        if batch is not None:
            return 1 if answer_batch(llm, batch, output or sys.stdout) else 0
        _answer_prompts(llm, inputs, llm.default_sampling_params(**sampling), output, raw=namespace.raw)
    return 0


def _say_what_is_kept(output: AnswerFile, lines: int, path: str) -> int:
    """The number of answers that are missing; says how many an earlier run left."""
    missing = len(output.missing)
    if not missing:
        output.finish()
        print(f"all {lines} answers are in {path} already; delete it to answer again", file=sys.stderr)
    elif missing < lines:
        print(f"{lines - missing} of {lines} answers are kept from an earlier run", file=sys.stderr)
    return missing


def _answer_prompts(
    llm: LLM,
    inputs: Sequence[str | Conversation],
    sampling: SamplingParams,
    output: AnswerFile | TextIO | None,
    *,
    raw: bool,
) -> None:
    """Answer prompts, and print the answers or write each when it completes."""
    places = output.missing if isinstance(output, AnswerFile) else list(range(len(inputs)))
    futures = llm.submit([_prompt(llm, inputs[place], raw=raw) for place in places], sampling)
    if not isinstance(output, AnswerFile):
        _write(inputs, follow(futures, llm.generated_tokens), output)
        return
    for place, future in zip(places, futures, strict=True):
        future.add_done_callback(partial(_keep, output, place, inputs[place]))
    follow(futures, llm.generated_tokens)
    # A future wakes those that wait for it before it calls back.
    for place, future in zip(places, futures, strict=True):
        if place not in output.answers:
            _keep(output, place, inputs[place], future)
    output.finish()


def _keep(output: AnswerFile, place: int, item: str | Conversation, future: "Future[Generation]") -> None:
    if not future.cancelled() and future.exception() is None:
        output.add(place, _record(item, future.result()))


def _sorted(inputs: list[str | Conversation | BatchLine]) -> tuple[list[BatchLine] | None, list[str | Conversation]]:
    """(the lines of a batch file, None for another; the prompts of another). Raises ConfigError for both in one, and
    for two lines with one id.
    """
    batch = [item for item in inputs if isinstance(item, dict)]
    if batch and len(batch) < len(inputs):
        raise ConfigError("a file holds either prompts or batch lines (custom_id, method, url, body), not both")
    check_ids(batch)
    return batch or None, [item for item in inputs if not isinstance(item, dict)]


def _sampling(namespace: argparse.Namespace) -> dict[str, Any]:
    """Fields of `SamplingParams` from the command line; the model's defaults fill in the rest. Raises ConfigError."""
    if namespace.max_tokens < 1:
        raise ConfigError(f"--max-tokens is {namespace.max_tokens}; it must be at least 1")
    given: dict[str, Any] = {
        "max_new_tokens": namespace.max_tokens,
        "seed": namespace.sampling_seed,
        "stop": namespace.stop,
    }
    optional = {"temperature": namespace.temperature, "top_p": namespace.top_p}
    return given | {name: value for name, value in optional.items() if value is not None}


def read_inputs(prompt: str | None, path: str | None) -> Iterator[str | Conversation | BatchLine]:
    """Prompts from the command line, standard input (-) or a file, as text or as messages, or lines of a batch file.

    Raises ConfigError for both or neither, and for a file that cannot be read.
    """
    if (prompt is None) == (path is None):
        raise ConfigError("give a prompt, or a file of prompts with --input")
    if prompt is not None:
        yield _standard_input() if prompt == "-" else prompt
        return
    assert path is not None
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise ConfigError(f"--input {path} cannot be read: {reason}") from error
    for number, line in enumerate(lines, start=1):
        if line.strip():
            yield prompt_from_json(line, f"{path}, line {number}") if path.endswith(".jsonl") else line


def _standard_input() -> str:
    """All of standard input. Raises ConfigError if it is closed or not text."""
    if sys.stdin is None:
        raise ConfigError("standard input is closed; give the prompt as an argument, or a file by --input")
    try:
        return sys.stdin.read()
    except UnicodeDecodeError as error:
        raise ConfigError(f"standard input cannot be read: {error}") from error


def prompt_from_json(line: str, where: str) -> str | Conversation | BatchLine:
    """The prompt of one JSON line: a string, or an object with prompt, text or messages; or a line of a batch file."""
    try:
        content = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{where}: not JSON: {error}") from error
    if isinstance(content, str):
        return content
    if is_batch_line(content):
        return check_batch_line(content, where)
    fields = content if isinstance(content, dict) else {}
    messages = fields.get("messages")
    if isinstance(messages, list) and all(isinstance(message, dict) for message in messages):
        return messages
    text = fields.get("prompt", fields.get("text"))
    if not isinstance(text, str):
        raise ConfigError(f"{where}: it has no prompt, text or messages")
    return text


def _prompt(llm: LLM, item: str | Conversation, *, raw: bool) -> Prompt:
    """An input as a prompt: through the chat template if the model has one, unless `raw`."""
    if llm.tokenizer is None:
        raise ConfigError("tokenyard generate needs a tokenizer; drop --skip-tokenizer-init")
    if isinstance(item, str) and llm.has_chat_template and not raw:
        return [{"role": "user", "content": item}]
    return item


def _open_output(stack: ExitStack, path: str, lines: list[Any], options: Any) -> AnswerFile | TextIO:
    """The file to write to, a stream where the path is that of a device or pipe. Raises ConfigError for one that cannot
    be opened.
    """
    if Path(path).exists() and not Path(path).is_file():
        try:
            return stack.enter_context(open(path, "w", encoding="utf-8"))
        except OSError as error:
            raise ConfigError(f"--output {path} cannot be written: {error.strerror}") from error
    answers = AnswerFile(path, lines, options)
    stack.callback(answers.close)
    return answers


def _line(item: str | Conversation) -> dict[str, Any]:
    """What an answer's record says of its input."""
    return {"prompt" if isinstance(item, str) else "messages": item}


def _record(item: str | Conversation, answer: Generation) -> dict[str, Any]:
    """An answer as a line of the output."""
    return {
        **_line(item),
        "text": answer.text,
        "finish_reason": answer.completions[0].finish_reason,
        "prompt_tokens": answer.prompt_tokens,
        "completion_tokens": len(answer.completions[0].token_ids),
    }


def _write(inputs: Sequence[str | Conversation], answers: Sequence[Generation], output: TextIO | None) -> None:
    """Answers as JSON lines in a stream or, where there are several, on standard output; a single one there as text."""
    if output is None and len(answers) == 1:
        print(answers[0].text)
        return
    for item, answer in zip(inputs, answers, strict=True):
        (output or sys.stdout).write(json.dumps(_record(item, answer), ensure_ascii=False) + "\n")
