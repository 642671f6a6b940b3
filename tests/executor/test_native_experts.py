"""Layers of experts by the native kernels of every instruction set against float64, in poisoned memory.

Bounds: as in test_native_kernels.py. What gate and up found is rounded to the activations' dtype before it goes down.
"""

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

from tokenyard.base import ConfigError
from tokenyard.executor.models.config import ModelConfig, MoeConfig, RopeConfig
from tokenyard.executor.native.library import LEVELS, NoLibraryError, load_library
from tokenyard.executor.native.moe import NativeMoe
from tokenyard.executor.native.runtime import NativeRuntime, address

try:
    LIBRARY = load_library()
except NoLibraryError as error:
    pytest.skip(f"no native library: {error}", allow_module_level=True)

KERNELS = pytest.mark.parametrize("level", LIBRARY.levels(), ids=lambda level: LEVELS[level])
DTYPE = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
ROUNDING = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-9}
NAN = float("nan")
PREFIX = "model.layers.0.mlp"


class Drawn:
    """Weights that are drawn when they are first asked for, by name; see Weights."""

    def __init__(self, dtype, seed=0):
        self._dtype, self._seed, self._own = dtype, seed, {}

    def get(self, name, shape):
        if name not in self._own:
            generator = torch.Generator().manual_seed(1000 * self._seed + len(self._own))
            self._own[name] = (torch.randn(*shape, generator=generator) * shape[-1] ** -0.5).to(self._dtype)
        return self._own[name]

    def fill(self, name, shape, value):
        self.get(name, shape).fill_(value)


def config_of(hidden=48, inter=40, count=7, active=3, *, normed=True, bias=False, activation="silu", limit=0.0):
    experts = MoeConfig(count, active, inter, normed, frozenset({0}), bias)
    return ModelConfig(
        *("", 1, hidden, inter, 1, 1, 1, 64, 1e-6, 64),
        rope=RopeConfig(),
        windows=(0,),
        experts=experts,
        activation=activation,
        gate_limit=limit,
    )


def layer_of(config, weights, dtype, level=None, threads=2):
    return NativeMoe(NativeRuntime(LIBRARY, threads, level), dtype, config, weights, 0)


def computed(layer, x):
    """The layer's output, in memory that was poisoned before: float32[rows, hidden]."""
    given = x.to(layer.activations).contiguous()
    out = torch.full(x.shape, NAN)
    assert not layer.functions.ty_experts_run(layer.handle, address(given), len(x), address(out))
    return out


def gated(config, gate, up):
    if config.activation == "clamped_swiglu":
        gate, up = gate.clamp(max=config.gate_limit), up.clamp(-config.gate_limit, config.gate_limit)
        return gate * torch.sigmoid(1.702 * gate) * (up + 1)
    return (F.gelu(gate, approximate="tanh") if config.activation == "gelu_tanh" else F.silu(gate)) * up


def exact(config, weights, x, rounding):
    """The layer in float64, and how far roundings may take it: float64[rows, hidden] both."""
    facts, unit = config.experts, 64 * ROUNDING[torch.float32]
    hidden, inter = config.hidden_size, facts.intermediate_size

    def product(name, outputs, inputs, x):
        weight = weights.get(f"{PREFIX}.{name}.weight", (outputs, inputs)).double()
        bias = torch.zeros(outputs).double()
        if facts.bias:
            bias = weights.get(f"{PREFIX}.{name}.bias", (outputs,)).double()
        return x @ weight.T + bias, x.abs() @ weight.T.abs() + bias.abs() + 1.0

    x = x.double()
    logits, size = product("gate", facts.count, hidden, x)
    scores, chosen = logits.softmax(-1).topk(facts.active)
    if facts.normed:
        scores = scores / scores.sum(-1, keepdim=True)
    out, bound = torch.zeros(x.shape).double(), torch.zeros(x.shape).double()
    for expert in range(facts.count):
        own = f"experts.{expert}"
        gate, gate_size = product(f"{own}.gate_proj", inter, hidden, x)
        up, up_size = product(f"{own}.up_proj", inter, hidden, x)
        inner = gated(config, gate, up)
        inner_off = 2 * unit * gate_size * up_size + 2 * rounding * inner.abs()
        found, found_size = product(f"{own}.down_proj", hidden, inter, inner)
        down = weights.get(f"{PREFIX}.{own}.down_proj.weight", (hidden, inter)).double().abs()
        score = torch.where(chosen == expert, scores, 0.0).sum(-1, keepdim=True)
        out += score * found
        bound += score * (inner_off @ down.T + (unit + 4 * unit * size.max()) * found_size)
    if facts.active < facts.count:
        # Where roundings decide which experts a row takes, it may take any.
        best = logits.sort(dim=-1, descending=True).values
        unsure = best[:, facts.active - 1] - best[:, facts.active] <= 4 * unit * size.max()
        assert unsure.sum() < 1 + 0.05 * len(x)
        bound[unsure] = torch.inf
    return out, bound


SHAPES = {
    "usual": {},
    "odd": {"hidden": 33, "inter": 21, "count": 5, "active": 2},
    "two": {"hidden": 34, "inter": 2, "count": 2, "active": 1},
    "all": {"hidden": 66, "inter": 16, "count": 3, "active": 3, "normed": False},
    "many": {"hidden": 32, "inter": 33, "count": 70, "active": 9, "normed": False},
    "biases": {"bias": True, "activation": "clamped_swiglu", "limit": 0.7},
    "gelu": {"activation": "gelu_tanh"},
}


@KERNELS
@DTYPE
@pytest.mark.parametrize("name", SHAPES)
def test_experts(level, dtype, name):
    config, weights = config_of(**SHAPES[name]), Drawn(dtype, len(name))
    layer = layer_of(config, weights, dtype, level)
    for rows in (1, 2, 7, 60, 200):
        x = torch.randn(rows, config.hidden_size, generator=torch.Generator().manual_seed(rows)).to(dtype)
        expected, bound = exact(config, weights, x, ROUNDING[layer.activations])
        assert ((computed(layer, x) - expected).abs() <= bound).all()


@KERNELS
@DTYPE
def test_a_row_does_not_depend_on_the_others_nor_on_threads(level, dtype):
    config, weights = config_of(hidden=16, inter=6), Drawn(dtype)
    layer = layer_of(config, weights, dtype, level)
    # More rows than are computed at once.
    x = torch.randn(1100, 16, generator=torch.Generator().manual_seed(1)).to(dtype)
    whole = computed(layer, x)
    for rows in (1, 2, 5, 13, 97, 1025):
        assert torch.equal(computed(layer, x[:rows]), whole[:rows])
        assert torch.equal(computed(layer, x[-rows:]), whole[-rows:])
    for threads in (1, 3):
        assert torch.equal(computed(layer_of(config, weights, dtype, level, threads), x), whole)
    assert layer(x[:0]).shape == (0, 16)
    assert layer(x[:3]).dtype == dtype


@KERNELS
@DTYPE
def test_experts_that_no_row_takes_are_not_read(level, dtype):
    config, weights = config_of(bias=True), Drawn(dtype)
    for expert in (0, 3, 4, 6):
        weights.fill(f"{PREFIX}.experts.{expert}.up_proj.weight", (40, 48), NAN)
        weights.fill(f"{PREFIX}.experts.{expert}.down_proj.bias", (48,), NAN)
    weights.fill(f"{PREFIX}.gate.weight", (7, 48), 0.0)
    bias = weights.get(f"{PREFIX}.gate.bias", (7,))
    bias.copy_(torch.tensor([0.0, 3.0, 2.0, -1.0, 0.0, 2.5, 0.0]))
    layer = layer_of(config, weights, dtype, level)
    for rows in (1, 50):  # all of them to the same experts
        assert computed(layer, torch.ones(rows, 48, dtype=dtype)).isfinite().all()


def test_equal_scores_take_the_first_experts():
    config, weights = config_of(count=5, active=2), Drawn(torch.float32)
    weights.fill(f"{PREFIX}.gate.weight", (5, 48), 0.0)
    for expert in (2, 3, 4):
        weights.fill(f"{PREFIX}.experts.{expert}.down_proj.weight", (48, 40), NAN)
    x = torch.randn(4, 48, generator=torch.Generator().manual_seed(1))
    for level in LIBRARY.levels():
        assert computed(layer_of(config, weights, torch.float32, level), x).isfinite().all()


@KERNELS
@DTYPE
@pytest.mark.parametrize("odd", [NAN, float("inf")])
@pytest.mark.parametrize("activation", ["silu", "clamped_swiglu"])
def test_an_odd_number_stays_in_its_row_and_is_not_hidden(level, dtype, odd, activation):
    config, weights = config_of(activation=activation, limit=1.0), Drawn(dtype)
    layer = layer_of(config, weights, dtype, level)
    x = torch.randn(9, 48, generator=torch.Generator().manual_seed(2)).to(dtype)
    whole = computed(layer, x)
    x[4, 7] = odd
    found = computed(layer, x)
    assert found[4].isnan().all()
    assert torch.equal(found[[0, 1, 2, 3, 5, 6, 7, 8]], whole[[0, 1, 2, 3, 5, 6, 7, 8]])


def test_no_memory_is_said_in_one_line():
    functions = SimpleNamespace(ty_experts_new=lambda *given: None)
    engine = SimpleNamespace(functions=functions, active_dtype=lambda dtype: dtype, pool=None, level=0)
    with pytest.raises(ConfigError, match="no memory for the packed weights"):
        NativeMoe(engine, torch.float32, config_of(), Drawn(torch.float32), 0)
