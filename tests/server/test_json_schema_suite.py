"""The JSON-Schema-Test-Suite against what answers may be, with a baseline that may only improve.

`TOKENYARD_WRITE_BASELINE=1` rewrites the baseline. A schema that is refused is a clear 400 for its client. What is
wrong is worse: an invalid instance that the grammar takes, or a valid one that it does not (mostly because properties
must come in the schema's order).
"""

import io
import json
import os
import tarfile
from pathlib import Path

import pytest
from llguidance import LLMatcher, LLTokenizer

from tests.executor.test_grammar import TOKENIZER
from tokenyard.base import InvalidRequestError
from tokenyard.server.openai.structured_outputs import Grammar, schema_rule

SUITE = Path(__file__).resolve().parents[2] / "../shared/prompts/JSON-Schema-Test-Suite-draft7-2020-12.tar.zst"
BASELINE = Path(__file__).with_name("json_schema_baseline.json")


def groups():
    """(file, group) of each schema of the suite with its instances."""
    zstandard = pytest.importorskip("zstandard")
    with SUITE.open("rb") as packed, zstandard.ZstdDecompressor().stream_reader(packed) as unpacked:
        whole = io.BytesIO(unpacked.read())
    with tarfile.open(fileobj=whole) as archive:
        for member in archive.getmembers():
            if member.name.endswith(".json") and "/tests/" in f"/{member.name}":
                name = member.name.split("tests/", 1)[1]
                for group in json.load(archive.extractfile(member)):
                    yield name, group


def takes(vocabulary, matcher, text: str) -> bool:
    own = matcher.deep_copy()
    tokens = vocabulary.tokenize_str(text)
    return own.try_consume_tokens(tokens) == len(tokens) and own.is_accepting()


def judge(vocabulary, schema, instances) -> tuple[bool, list[str]]:
    """(whether a schema is refused, what its grammar gets wrong)."""
    try:
        text = Grammar("answer", {"answer": schema_rule(schema, lenient=False, param="schema")}).text()
    except InvalidRequestError:
        return True, []
    matcher = LLMatcher(vocabulary, text, log_level=0)
    first = matcher.deep_copy()
    if not matcher.is_error():
        first.compute_bitmask()
    if first.is_error():
        return True, []
    return False, [
        f"{each['description']}: {'valid, refused' if each['valid'] else 'invalid, taken'}"
        for each in instances
        if takes(vocabulary, matcher, json.dumps(each["data"], ensure_ascii=False)) != each["valid"]
    ]


@pytest.mark.slow
def test_the_suite_is_no_worse_than_the_baseline():
    if not SUITE.is_file():
        pytest.skip(f"{SUITE.name} is not there")
    vocabulary = LLTokenizer(TOKENIZER)
    refused, wrong, schemas, instances = [], [], 0, 0
    for name, group in groups():
        schemas, instances = schemas + 1, instances + len(group["tests"])
        no, faults = judge(vocabulary, group["schema"], group["tests"])
        where = f"{name}: {group['description']}"
        refused += [where] if no else []
        wrong += [f"{where}: {fault}" for fault in faults]
    assert schemas > 500
    if os.environ.get("TOKENYARD_WRITE_BASELINE"):
        found = {"schemas": schemas, "instances": instances, "refused": sorted(refused), "wrong": sorted(wrong)}
        BASELINE.write_text(json.dumps(found, indent=1, ensure_ascii=False) + "\n")
    baseline = json.loads(BASELINE.read_text())
    assert set(wrong) <= set(baseline["wrong"])
    assert set(refused) <= set(baseline["refused"])
