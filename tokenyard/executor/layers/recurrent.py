"""What layers with a recurrent state have in common: a causal convolution, and states that rows continue."""

from collections.abc import Callable

import torch

from tokenyard.executor.forward_batch import ForwardBatch
from tokenyard.executor.state_pool import Replay

Advance = Callable[[torch.Tensor, slice, torch.Tensor], torch.Tensor]
"""(convolved [rows, channels], tokens of the batch, states [rows, ...]) -> [rows, ...]; changes the states in place."""
Run = Callable[[torch.Tensor, slice, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
"""(convolved [tokens, channels], tokens of the batch, state [...]) -> [tokens, ...], and the state after them."""


def recur(
    batch: ForwardBatch,
    index: int,
    mixed: torch.Tensor,
    weights: torch.Tensor,
    bias: torch.Tensor | None,
    advance: Advance,
    run: Run,
) -> torch.Tensor:
    """Convolve [tokens, channels] and compute a recurrence over them: float32[tokens, ...] of what the two return.

    index: the layer's number among those with a state. weights: float32[kernel, channels], the oldest token first, and
    bias float32[channels] or None, of the convolution. advance: computes a token of several rows that decode. run:
    computes tokens of one row. Both continue the rows' states in the batch's pool, which are written back, except
    after drafts: how many of them count shows later.
    """
    states = batch.states
    assert states is not None, "a batch of this model needs the states of its rows"
    conv, recurrent = states.pool.layer(index)
    decodes, found = batch.decode_rows, list[torch.Tensor]()
    if decodes:
        slots = states.decode_slots
        window, state = torch.cat((conv[slots], mixed[:decodes, None]), dim=1), recurrent[slots]
        convolved = (window.float() * weights).sum(dim=1)
        found.append(advance(convolved if bias is None else convolved + bias, slice(0, decodes), state))
        conv[slots], recurrent[slots] = window[:, 1:], state
        if states.decode_saves is not None:
            saved, targets = states.decode_saves
            conv[targets], recurrent[targets] = window[saved, 1:], state[saved]
    for own in states.runs:
        tokens = slice(own.first, own.end)
        last, state = conv[own.slot], recurrent[own.slot]
        if own.fresh:
            last, state = torch.zeros_like(last), torch.zeros_like(state)
        window = torch.cat((last, mixed[tokens]))
        outputs, state = run(causal_conv(window.float(), weights, bias), tokens, state)
        found.append(outputs)
        if not own.targets:
            replay = _replay(window, weights, bias, run, own.first, recurrent[own.slot], state)
            states.unverified.setdefault(own.first, []).append(replay)
        for slot in own.targets:
            conv[slot], recurrent[slot] = window[len(window) - len(weights) + 1 :], state
    return torch.cat(found)


def _replay(
    window: torch.Tensor,
    weights: torch.Tensor,
    bias: torch.Tensor | None,
    run: Run,
    first: int,
    before: torch.Tensor,
    after: torch.Tensor,
) -> Replay:
    """How to compute the states after some of the tokens of a run again; `before` and `after` are those around all."""
    past = len(weights) - 1

    def replay(count: int) -> tuple[torch.Tensor, torch.Tensor]:
        part, state = window[: past + count], after
        if len(part) < len(window):
            _, state = run(causal_conv(part.float(), weights, bias), slice(first, first + count), before)
        return part[count:], state

    return replay


def causal_conv(x: torch.Tensor, weights: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Convolve channels of [tokens + kernel - 1, channels] by `weights` [kernel, channels]: [tokens, channels]."""
    tokens = len(x) - len(weights) + 1
    found = x[:tokens] * weights[0]
    for place in range(1, len(weights)):
        found.addcmul_(x[place : place + tokens], weights[place])
    return found if bias is None else found.add_(bias)
