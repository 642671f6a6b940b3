"""Ids of stored responses. Each names the engine that stores it, so that any router finds it without a table. Pure."""

import re
import uuid

ENGINE_DIGITS = 12
"""How many hexadecimal digits of an id name the engine: the first ones of its boot id."""

_ID = re.compile(rf"resp_([0-9a-f]{{{ENGINE_DIGITS}}})[0-9a-f]{{{32 - ENGINE_DIGITS}}}")


def new_response_id(boot_id: str) -> str:
    """A new id of the engine with this boot id, which is hexadecimal."""
    return f"resp_{boot_id[:ENGINE_DIGITS]}{uuid.uuid4().hex[ENGINE_DIGITS:]}"


def engine_of_response(response_id: object) -> str:
    """The beginning of the boot id of the engine that stores a response, "" for an id of another form."""
    found = _ID.fullmatch(response_id) if isinstance(response_id, str) else None
    return found[1] if found else ""
