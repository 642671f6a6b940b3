"""The protocol between a prefill and a decode engine, without sockets, threads or clocks.

The decode engine orchestrates. It requests the KV of a prompt from a prefill engine (`Want`), receives the location of
the KV and the first token of the answer (`Offer`), reads the KV into its own pages, and then asks whether the KV was
valid throughout the read (`Done`). Only then does it use the pages. The prefill engine keeps its pages under a lease,
which `Beat` renews. After a lost message, a timeout, or the end or restart of the prefill engine, the decode engine
computes the prompt itself.

Only the owner of a page writes it, so a late write cannot damage a page that belongs to another request. A read that
ends too late is discarded (a sequence lock; Lameter 2005).
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
