"""Totals that the scheduler keeps from its start on."""

from dataclasses import dataclass


@dataclass(slots=True)
class Counters:
    """Totals since the start. Tokens: prompt (submitted), hit (found in the tree at first admission), prefill (computed
    in chunks), recomputed (computed again after a retraction), generated (sampled and kept), draft (verified), accepted
    draft. verify_rows: rows that verified drafts, counted in each step. adapter_loads: LoRA adapters brought to slots.
    """

    steps: int = 0
    prefill_steps: int = 0
    decode_steps: int = 0
    submitted: int = 0
    rejected: int = 0
    finished: int = 0
    aborted: int = 0
    retracted: int = 0
    preempted: int = 0
    prompt_tokens: int = 0
    hit_tokens: int = 0
    prefill_tokens: int = 0
    recomputed_tokens: int = 0
    generated_tokens: int = 0
    verify_rows: int = 0
    draft_tokens: int = 0
    accepted_draft_tokens: int = 0
    adapter_loads: int = 0
