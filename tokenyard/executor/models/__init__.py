"""Decoder models: what a checkpoint's config says, and the one model that all of them are settings of."""
