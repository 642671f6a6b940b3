import pytest

from tokenyard.routing.load import DispatchedRequest, TargetLoad, TtftModel


def test_load_returns_to_zero_however_a_request_ends():
    state = TargetLoad("w")
    sent = [DispatchedRequest(state, 1000, 400, 0.0) for _ in range(3)]
    assert (state.requests, state.prefill_tokens, state.context_tokens) == (3, 1800.0, 3000)
    sent[0].first_token(0.1)
    assert state.prefill_tokens == 1200.0
    for one in sent:
        one.end()
        one.end()
        one.first_token(1.0)
    assert (state.requests, state.prefill_tokens, state.context_tokens) == (0, 0.0, 0)
    assert state.served == 3


def test_speed_is_learnt_from_any_device():
    for token_s in (1e-5, 1e-4, 5e-3):
        speed = TtftModel()
        for i in range(400):
            tokens = 100.0 + 37 * i % 3000
            speed.observe(tokens, 0.05 + token_s * tokens)
        assert speed.token_s == pytest.approx(token_s, rel=0.1)
        assert speed.predict_s(2000) == pytest.approx(0.05 + token_s * 2000, rel=0.1)


def test_speed_stays_usable_whatever_it_sees():
    speed = TtftModel()
    for tokens, seconds in ((0.0, 0.0), (1e9, 0.0), (5.0, 1e9), (5.0, 0.0)) * 50:
        speed.observe(tokens, seconds)
        assert 0.0 < speed.token_s < 1.0
        assert speed.predict_s(100) >= 0.0


def test_a_slow_target_is_seen_and_forgiven_after_a_restart():
    speed = TtftModel()
    fast, slow = TargetLoad("a", speed), TargetLoad("b", speed)
    for i in range(200):
        for state, factor in ((fast, 1.0), (slow, 3.0)):
            one = DispatchedRequest(state, 1000, 0, float(i))
            one.first_token(i + factor * 0.1)
            one.end()
    assert slow.slowness > 1.8 * fast.slowness
    slow.forget()
    assert slow.slowness == 1.0


def test_wrong_cache_predictions_cost_credit():
    state = TargetLoad("w")
    for _ in range(30):
        one = DispatchedRequest(state, 1000, 800, 0.0)
        one.hit(0)
        one.end()
    assert state.credit < 0.1
    for _ in range(60):
        one = DispatchedRequest(state, 1000, 800, 0.0)
        one.hit(900)
        one.end()
    assert state.credit > 0.9


def test_a_full_target_says_so():
    state = TargetLoad("w", room=1)
    assert not state.full
    one = DispatchedRequest(state, 1, 0, 0.0)
    assert state.full
    one.end()
    assert not state.full
