"""Prefill and decode in different engines (PD disaggregation): the protocol, and the transports that carry KV."""
