"""KV transfers in virtual time: from prefill to decode engines over links, and to and from the KV store."""
