"""What the APIs beside OpenAI's chat share: they become one chat job, whose answer comes back as events."""

from collections.abc import Awaitable, Callable, Sequence

from tokenyard.engine.frontend.io_struct import OutputDelta
from tokenyard.server.http.generate import CompletionOutput, RequestContext, run
from tokenyard.server.openai.completions import PreparedRequest
from tokenyard.server.parse.events import ContentText, Event

TakeEvents = Callable[[CompletionOutput, Sequence[Event]], Awaitable[None]]


async def run_events(call: RequestContext, job: PreparedRequest, take: TakeEvents) -> CompletionOutput:
    """Run a job of one answer and give `take` what each piece of its text completes; `finish` is set at the last."""
    answer = CompletionOutput()
    if job.reading is not None:
        answer.reader = job.reading.reader()

    async def take_delta(_: int, delta: OutputDelta) -> None:
        answer.add(delta, keep=False)
        if answer.reader is not None:
            events = answer.reader.feed(delta.text, last=delta.finish is not None)
        else:
            events = [ContentText(delta.text)] if delta.text else []
        await take(answer, events)

    await run(call, job.specs, take_delta)
    return answer


def reasoning_tokens(answer: CompletionOutput) -> int:
    """How many tokens of an answer are reasoning."""
    return answer.reader.reasoning_tokens if answer.reader is not None else 0


def has_tool_calls(answer: CompletionOutput) -> bool:
    """Whether an answer calls a tool."""
    return answer.reader is not None and bool(answer.reader.message.calls)
