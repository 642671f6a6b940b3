"""What the APIs beside OpenAI's chat share: they become one chat job, whose answer comes back as events."""

from collections.abc import Awaitable, Callable, Sequence

from tokenyard.engine.spec import OutputDelta
from tokenyard.server.answers import Answer, Call, run
from tokenyard.server.openai import Job
from tokenyard.server.parse.events import Content, Event

TakeEvents = Callable[[Answer, Sequence[Event]], Awaitable[None]]


async def run_events(call: Call, job: Job, take: TakeEvents) -> Answer:
    """Run a job of one answer and give `take` what each piece of its text completes; `finish` is set at the last."""
    answer = Answer()
    if job.reading is not None:
        answer.reader = job.reading.reader()

    async def take_delta(_: int, delta: OutputDelta) -> None:
        answer.add(delta, keep=False)
        if answer.reader is not None:
            events = answer.reader.feed(delta.text, last=delta.finish is not None)
        else:
            events = [Content(delta.text)] if delta.text else []
        await take(answer, events)

    await run(call, job.specs, take_delta)
    return answer


def reasoning_tokens(answer: Answer) -> int:
    """How many tokens of an answer are reasoning."""
    return answer.reader.reasoning_tokens if answer.reader is not None else 0


def has_calls(answer: Answer) -> bool:
    """Whether an answer calls a tool."""
    return answer.reader is not None and bool(answer.reader.message.calls)
