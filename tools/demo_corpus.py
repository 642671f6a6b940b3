"""Reads the story corpus and turns stories into training samples for the demo model.

A sample is a piece of text with role markers. Each story is told in one of two ways, chosen again in every
epoch: as a plain document, or as the answer to a chat request that is made up from the story itself. Names and
animals are exchanged at random, so that the model learns to keep to a name instead of learning stories by heart.
"""

from __future__ import annotations

import gzip
import random
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from demo_small_talk import SMALL_TALK

BOS = "<|startoftext|>"
EOS = "<|endoftext|>"
PAD = "<|pad|>"
SYSTEM = "<|system|>"
USER = "<|user|>"
ASSISTANT = "<|assistant|>"
END = "<|end|>"
SPECIAL_TOKENS = (BOS, EOS, PAD, SYSTEM, USER, ASSISTANT, END)
SHORTEST = 200
"""Texts of fewer characters are scraps and are left out."""


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


GIRLS = _words(
    """
    Lily Lucy Sara Anna Mia Emma Sue Jane Amy Daisy Lila Ella Molly Bella Zoe Nina Ruby Rose Kim Jill Lola
    Mary Kate Sally Ada Clara Eva Alice Grace Julia Maya Nora Sophie Ivy Iris Tina Susie Jenny Sarah Betty
    """
)
BOYS = _words(
    """
    Tim Tom Ben Max Sam Jack Timmy Bob Tommy Joe John Billy Jimmy Jim Leo Mark Bobby Johnny Tony Danny Peter
    Mike Sammy Henry Oscar Paul Adam David Eric Fred George Hugo Ian Luke Noah Oliver Robin Simon Theo Charlie
    """
)
ANIMALS = _words(
    """
    dog cat bear rabbit frog duck lion tiger bird pig cow horse monkey goat hen squirrel turtle dragon kitten
    snake whale parrot penguin robot wolf fox mouse bunny puppy
    """
)
_PLURALS = {"wolf": "wolves", "fox": "foxes", "mouse": "mice", "bunny": "bunnies", "puppy": "puppies"}

SYSTEM_LINES = (
    "You are a helpful assistant.",
    "You are a storyteller for children.",
    "You tell short stories.",
    "Answer with a short story.",
    "Be kind and use simple words.",
)

_NAMES = frozenset(GIRLS + BOYS)
_OPENING = "Once upon a time"
_PLAIN_REQUESTS = (
    "Tell me a {}.", "Tell me a {}", "Tell me a short {}", "Write a {}", "Can you tell me a {}?",
    "Please tell me a bedtime {}.", "I want a {}", "Another {}, please.",
)  # fmt: skip
_REQUESTS = (
    "Tell me a {} about {}", "Tell me a {} about {}", "Tell me a {} about {}.", "Write a {} about {}",
    "Write a {} about {}.", "Tell me a short {} about {}", "Write a short {} about {}.",
    "Can you tell a {} about {}?", "I want a {} about {}.", "Please tell me a {} about {}.",
    "A {} about {}, please", "Make up a {} about {}",
)  # fmt: skip

_MOJIBAKE = {"â€œ": '"', "â€™": "'", "â€˜": "'", "â€”": "-", "â€“": "-", "â€": '"'}
_TYPOGRAPHIC = {"“": '"', "”": '"', "’": "'", "‘": "'", "—": " - ", "–": "-", "…": "...", "\u00a0": " "}
_STORY_OPENING = re.compile(r"^(Once upon|Once there|One day, (a|an|there|two)\b|There (once )?was|Once, there)")
_SUBJECT = re.compile(
    r"\b(?:a|an|the|his|her|their)\s+((?:[a-z]+\s+)?)([A-Za-z][a-z]{2,11})(?=[.,;!?]|\s+(?:was|were|is|and|had|named|"
    r"called|who|that|in|on|at|to|with|came|went|said|from|lived|saw|of|as|for|by)\b)"
)
_NOT_A_SUBJECT = frozenset(
    _words(
        """
        little big small old new other best same first last next right left day time way lot end thing
        things one ones moral others rest top bottom side middle more most very two three once some
        friend friends name mom dad mommy daddy mother father fun eyes hand hands head face arms nose
        mouth feet back truth world story morning night afternoon evening while moment minute bit kind
        part place home work said was had young good bad great long whole only and who that head heart
        own life there here back soft cold hot warm sad happy shiny dark loud quiet safe lesson name
        names idea problem people person kids children word words voice sound noise
        """
    )
)
_ADJECTIVE_STOP = frozenset(_words("the and very was were his her their for with that this all most more one own"))


@dataclass(frozen=True)
class Story:
    """One story, cleaned; `is_fable` if it is one of Aesop's."""

    text: str
    is_fable: bool = False


@dataclass(frozen=True)
class Corpus:
    """`short` stories become chat answers and documents; `long` tales only documents; `validation` is held out."""

    short: list[Story]
    long: list[str]
    validation: list[Story]


def clean(text: str) -> str:
    """Return `text` with plain quotes, single blanks and one empty line between paragraphs."""
    for wrong, right in (_MOJIBAKE | _TYPOGRAPHIC).items():
        text = text.replace(wrong, right)
    lines = (re.sub(r"[ \t]+", " ", line).strip() for line in text.split("\n"))
    return "\n\n".join(line for line in lines if line)


def subjects_of(text: str) -> tuple[str, ...]:
    """Return up to three things the story is about, e.g. ("brave fox", "well"), the most telling first.

    A noun is taken to be what follows an article (with one word between at most) and stands before a stop or
    a common verb or preposition. Nouns count by how often they come, and more if they come in the opening.
    """
    opening = len(text) // 4
    scores: Counter[str] = Counter()
    described: dict[str, str] = {}
    for match in _SUBJECT.finditer(text):
        adjective, noun = match.group(1).strip(), match.group(2).lower()
        if noun in _NOT_A_SUBJECT or noun.endswith(("ed", "ly", "ing")):
            continue
        scores[noun] += 2 if match.start() < opening else 1
        if adjective and adjective not in _ADJECTIVE_STOP:
            described.setdefault(noun, f"{adjective} {noun}")
    best = [noun for noun, score in scores.most_common(3) if score >= 2]
    return tuple(described.get(noun, noun) if rank == 0 else noun for rank, noun in enumerate(best))


def _read(path: Path) -> str:
    """Return the text of a gzip file; raise FileNotFoundError that names what is missing."""
    if not path.is_file():
        raise FileNotFoundError(f"{path} is missing: --corpus must name a folder with tinystories/ and fairytales/")
    return gzip.decompress(path.read_bytes()).decode("utf-8", errors="replace")


def _split_validation(text: str) -> list[str]:
    """Cut the validation file, which has no separators, where a paragraph opens like a story."""
    stories: list[list[str]] = []
    for paragraph in clean(text).split("\n\n"):
        if _STORY_OPENING.match(paragraph) or not stories:
            stories.append([])
        stories[-1].append(paragraph)
    return ["\n\n".join(story) for story in stories[1:-1]]


def load_corpus(folder: Path) -> Corpus:
    """Read every file of the corpus in `folder`. Raises FileNotFoundError if one is missing.

    The last story of a file that was cut off at some line is left out, so that all stories have an end.
    """
    separated = _read(folder / "tinystories" / "tinystories_10k.txt.gz").split(EOS)[:-1]
    by_line = re.split(r"(?<!\n)\n(?!\n)", _read(folder / "tinystories" / "tiny_stories.txt.gz"))[:-1]
    fables = _read(folder / "fairytales" / "aesop_for_children.txt.gz").split(EOS)
    tales = _read(folder / "fairytales" / "fairytaleqa_stories.txt.gz").split(EOS)
    held_out = _split_validation(_read(folder / "tinystories" / "tinystories_val.txt.gz"))
    short = [Story(clean(text)) for text in separated + by_line if len(text) > SHORTEST]
    short += [Story(clean(text), is_fable=True) for text in fables if len(text) > SHORTEST]
    long = [clean(tale) for tale in tales if len(tale) > SHORTEST]
    return Corpus(short, long, [Story(clean(text)) for text in held_out if len(text) > SHORTEST])


def exchange_words(text: str, pools: Sequence[Sequence[str]], rng: random.Random) -> str:
    """Return `text` with the words of each pool that it holds exchanged for others of that pool, one for one."""
    words = set(re.findall(r"[A-Za-z]+", text))
    mapping: dict[str, str] = {}
    for pool in pools:
        present = [word for word in pool if not words.isdisjoint(_forms(word))]
        free = [word for word in pool if word not in present]
        for old, new in zip(present, rng.sample(free, min(len(present), len(free))), strict=False):
            mapping.update(zip(_forms(old), _forms(new), strict=True))
    if not mapping:
        return text
    return re.sub(r"[A-Za-z]+", lambda match: mapping.get(match.group(0), match.group(0)), text)


def _forms(word: str) -> tuple[str, ...]:
    """Return the word itself for a name; for an animal also its plural and both with a capital."""
    if word[0].isupper():
        return (word,)
    plural = _PLURALS.get(word, word + "s")
    return word, plural, word.capitalize(), plural.capitalize()


def _with_article(noun: str) -> str:
    """Return "a fox", "an owl", "blocks"."""
    if noun.endswith("s") and not noun.endswith("ss"):
        return noun
    return f"{'an' if noun[0] in 'aeiou' else 'a'} {noun}"


def request_for(text: str, is_fable: bool, rng: random.Random) -> str:
    """Return a chat request that the story `text` would answer, in one case of six without capitals."""
    request = _request_as_written(text, "fable" if is_fable else "story", rng)
    return request.lower() if rng.random() < 0.16 else request


def _request_as_written(text: str, kind: str, rng: random.Random) -> str:
    subjects = subjects_of(text)
    first_sentence = re.split(r"(?<=[.!?])\s", text, maxsplit=1)[0]
    names = [name for name in re.findall(r"\b[A-Z][a-z]+\b", text[:300]) if name in _NAMES]
    draw = rng.random()
    if draw < 0.12 or not subjects:
        opening = text[: len(_OPENING)]
        return opening if opening == _OPENING and draw < 0.04 else rng.choice(_PLAIN_REQUESTS).format(kind)
    if draw < 0.2 and len(first_sentence) < 160:
        return f"Write a {kind} that begins: {first_sentence}"
    if draw < 0.3 and names:
        return rng.choice(_REQUESTS).format(kind, names[0])
    first = subjects[0] if rng.random() < 0.85 else rng.choice(subjects)
    about = _with_article(first if rng.random() < 0.4 else first.split()[-1])
    others = [noun.split()[-1] for noun in subjects if noun != first]
    if others and rng.random() < 0.25:
        about += f" and {_with_article(others[0])}"
    return rng.choice(_REQUESTS).format(kind, about)


def chat_turn(request: str, answer: str) -> str:
    """Return one request with its answer in the chat format."""
    return f"{USER}{request}{END}{ASSISTANT}{answer}{END}"


def sample_text(story: Story, rng: random.Random, exchange: bool = True) -> str:
    """Return a story as a chat (7 in 10, at times with a system line or small talk around) or a plain document."""
    text = story.text
    if exchange and rng.random() < 0.6:
        text = exchange_words(text, (GIRLS, BOYS), rng)
    if exchange and rng.random() < 0.25:
        text = exchange_words(text, (ANIMALS,), rng)
    if rng.random() < 0.3:
        return f"{BOS}{text}{EOS}"
    system = f"{SYSTEM}{rng.choice(SYSTEM_LINES)}{END}" if rng.random() < 0.1 else ""
    before = chat_turn(*rng.choice(SMALL_TALK)) if rng.random() < 0.08 else ""
    after = chat_turn(*rng.choice(SMALL_TALK)) if rng.random() < 0.05 else ""
    return BOS + system + before + chat_turn(request_for(text, story.is_fable, rng), text) + after


def small_talk_text(rng: random.Random) -> str:
    """Return a chat of one or two turns of small talk alone."""
    return BOS + "".join(chat_turn(*turn) for turn in rng.sample(SMALL_TALK, rng.choice((1, 1, 2))))
