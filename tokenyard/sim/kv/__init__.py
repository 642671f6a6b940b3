"""KV that moves in virtual time: from prefill to decode engines over links, and to tiers below the device."""
