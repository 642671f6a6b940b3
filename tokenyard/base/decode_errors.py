"""What msgspec raises for bytes that are not what they should be."""

import msgspec

DECODE_ERRORS = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)
"""Text that is not UTF-8 and values that are nested too deeply have errors of their own."""
