"""The protocol between a prefill and a decode engine, without sockets, threads or clocks.

The decode engine orchestrates. It asks a prefill engine for the KV of a prompt (`Want`), is told where the KV lies and
what the first token of the answer is (`Offer`), reads the KV into its own pages, and then asks whether it was valid all
the time (`Done`). Only then the pages count. The prefill engine keeps its pages under a lease, which `Beat` renews. A
lost message, a timeout, a dead, stopped or restarted engine: the decode engine computes the prompt itself.

Only the owner of a page ever writes it, so a late write cannot damage a page that belongs to another request. A read
that came too late is not undone but thrown away (a sequence lock; Lameter 2005).
"""

from tokenyard.disagg.protocol.decode_peer import DecodePeer, Peer
from tokenyard.disagg.protocol.messages import (
    VERSION,
    Beat,
    Close,
    Done,
    Drop,
    Gone,
    Message,
    Offer,
    Prefill,
    Read,
    Send,
    Timeouts,
    Want,
)
from tokenyard.disagg.protocol.prefill_peer import PrefillPeer

__all__ = [
    "VERSION",
    "Beat",
    "Close",
    "DecodePeer",
    "Done",
    "Drop",
    "Gone",
    "Message",
    "Offer",
    "Peer",
    "Prefill",
    "PrefillPeer",
    "Read",
    "Send",
    "Timeouts",
    "Want",
]
