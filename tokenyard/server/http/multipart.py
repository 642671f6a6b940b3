"""Fields of a form as browsers and OpenAI's clients upload files (RFC 7578)."""

import re
from dataclasses import dataclass

from tokenyard.base import InvalidRequestError

MAX_PARTS = 64
_BOUNDARY = re.compile(r'boundary="?([^";,]{1,70})"?')
_NAME = re.compile(rb'(?i)[;\s]name="([^"\r\n]*)"')
_FILENAME = re.compile(rb'(?i)[;\s]filename="([^"\r\n]*)"')


@dataclass(frozen=True, slots=True)
class FormPart:
    """One field: its content, and its file name, "" for none."""

    data: bytes
    filename: str = ""


def parse_form(content_type: str, body: bytes) -> dict[str, FormPart]:
    """The fields of a form by name; the last one of a name counts. Raises InvalidRequestError for another body."""
    match = _BOUNDARY.search(content_type)
    if not content_type.lower().startswith("multipart/form-data") or match is None:
        raise InvalidRequestError("the body must be a form (multipart/form-data) with the fields file and purpose")
    mark = b"--" + match[1].encode("latin-1")
    fields: dict[str, FormPart] = {}
    begin = body.find(mark)
    for _ in range(MAX_PARTS):
        if begin < 0:
            break
        begin += len(mark)
        if body[begin : begin + 2] == b"--":
            return fields
        end = body.find(b"\r\n" + mark, begin)
        head = body.find(b"\r\n\r\n", begin, end)
        if end < 0 or head < 0:
            break
        headers = body[begin:head]
        name, filename = _NAME.search(headers), _FILENAME.search(headers)
        if name is not None:
            shown = filename[1].decode("utf-8", "replace") if filename else ""
            fields[name[1].decode("utf-8", "replace")] = FormPart(body[head + 4 : end], shown)
        begin = end + 2
    raise InvalidRequestError("the form is cut off, or has too many fields")
