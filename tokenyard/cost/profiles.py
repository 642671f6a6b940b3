"""Built-in cost profiles and the files that `tokenyard calibrate` writes.

Where the numbers come from:

- `h100/llama-3-8b` is the profile of the project's reference simulation, term by term.
- The lines in N of the other A100 and H100 profiles are fits to the operator tables that Vidur publishes
  (microsoft/vidur, data/profiling); their floors are the measured times at N = 1.
- Attention is scaled from `h100/llama-3-8b` by KV bytes per token over memory speed (decode) and by layers x heads over
  compute (prefill).
- H200 is not measured. It is the H100 profile with floor and decode reads scaled by 0.70 (memory 4.8 against 3.35 TB/s,
  the same compute) and a larger KV pool.
- All-reduce terms of tensor-parallel profiles are estimates: two per layer at 10 us each, and the activations at 450
  GB/s on NVLink of H100, 300 GB/s on A100.
- `cpu` profiles are estimates for two server cores; run `tokenyard calibrate` for your own.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from tokenyard.base import ConfigError
from tokenyard.cost.linear import LinearCost, LinearTerms, Link
from tokenyard.cost.step_table import StepTable, TableCost

PROFILE_VERSION = 1
POOR_ERROR = 0.2
"""Mean relative error of a step's time above which predictions are a hint at most."""

H200_MEMORY_RATIO = 0.70
"""Memory time of H200 over that of H100."""

A100_MEMORY_RATIO = 3.35 / 2.039
"""Memory time of A100 80 GB over that of H100."""

A100_COMPUTE_RATIO = 0.06418 / 0.02021
"""Compute time of A100 over that of H100: the ratio of the measured slopes of Llama-2-7B."""

LINKS_GPU = {
    "host": Link(bytes_per_s=55e9, latency_s=20e-6),
    "disk": Link(bytes_per_s=5e9, latency_s=200e-6),
    "network": Link(bytes_per_s=40e9, latency_s=50e-6),
}
LINKS_CPU = {
    "host": Link(bytes_per_s=8e9, latency_s=2e-6),
    "disk": Link(bytes_per_s=1e9, latency_s=200e-6),
    "network": Link(bytes_per_s=1e9, latency_s=100e-6),
}


@dataclass(frozen=True, slots=True)
class Profile:
    """What simulator and server need to know of a model on a device: the cost terms and the size of the KV pool.

    source: where the numbers come from.
    tp: the number of devices that share each layer.
    error: the mean relative error of a step's predicted time; None if it was not measured.
    table: tables of step times, None where `terms` say it all; `terms` are then the closest linear ones.
    measured: what is known of the error against measured runs, in words; "" for nothing.
    request_ms, request_us_per_token: what passes outside the scheduler before a request's first token, per request and
        per token of its prompt: HTTP, tokenizing, detokenizing.
    state_slot_bytes: memory of one recurrent state over all layers; 0 for a model without.
    """

    device: str
    model: str
    terms: LinearTerms
    kv_pool_tokens: int
    kv_bytes_per_token: int
    context_length: int
    source: str
    tp: int = 1
    page_size: int = 16
    links: dict[str, Link] = field(default_factory=lambda: dict(LINKS_GPU))
    error: float | None = None
    table: StepTable | None = None
    measured: str = ""
    request_ms: float = 0.0
    request_us_per_token: float = 0.0
    state_slot_bytes: int = 0

    def __post_init__(self) -> None:
        """Raise ConfigError for sizes that are not above zero, and for an error that is no share."""
        if self.error is not None and not (isinstance(self.error, int | float) and self.error >= 0.0):
            raise ConfigError(f"the cost profile's error is {self.error!r}; it must be at least 0, or null for unknown")
        slot = self.state_slot_bytes
        if isinstance(slot, bool) or not isinstance(slot, int) or slot < 0:
            raise ConfigError(f"the cost profile's state_slot_bytes is {slot!r}; it must be a whole number, at least 0")
        for name in ("kv_pool_tokens", "kv_bytes_per_token", "context_length", "tp", "page_size"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ConfigError(f"the cost profile's {name} is {value!r}; it must be a whole number above 0")

    @property
    def name(self) -> str:
        """`device/model`, with `-tpN` if several devices share each layer."""
        return f"{self.device}/{self.model}" + (f"-tp{self.tp}" if self.tp > 1 else "")

    @property
    def warning(self) -> str:
        """Why times predicted with it are not to be relied on; "" if its error is small or unknown."""
        if self.error is None or self.error <= POOR_ERROR:
            return ""
        return (
            f"the cost model {self.name} is off by {100 * self.error:.0f} % of a step on average, more than "
            f"{100 * POOR_ERROR:.0f} %: take these times as a hint at most"
        )

    def cost(self) -> LinearCost:
        """A fixed cost model with these numbers."""
        if self.table is not None:
            return TableCost(terms=self.terms, links=dict(self.links), table=self.table)
        return LinearCost(self.terms, dict(self.links))

    def scaled(self, factor: float) -> "Profile":
        """The profile of a device whose steps take `factor` times as long."""
        table = None if self.table is None else self.table.scaled(factor)
        return replace(self, terms=self.terms.scaled(factor), table=table)


SOURCE_REFERENCE = "the project's reference simulation"
SOURCE_FITTED = "linear operators fitted to Vidur's tables; attention scaled from h100/llama-3-8b"
SOURCE_FITTED_70B = f"{SOURCE_FITTED} (Llama-2-70B, the same shape); all-reduce estimated"
SOURCE_ESTIMATED = "estimated for two server cores in float32; run `tokenyard calibrate` for your own"
SOURCE_SINGLE_STEPS = "from single steps of the native kernels in bfloat16 on two cores (Zen 4); calibrate your own"

_MODELS = {
    # KV bytes per token, context length
    "llama-3-8b": (131_072, 131_072),
    "llama-2-7b": (524_288, 4096),
    "llama-3-70b": (327_680, 131_072),
    "smollm2-135m": (46_080, 8192),
    "demo": (4096, 2048),
}


def _profile(
    name: str, terms: LinearTerms, kv_pool_tokens: int, source: str, tp: int = 1, links: dict[str, Link] = LINKS_GPU
) -> Profile:
    device, model = name.split("/")
    return Profile(device, model, terms, kv_pool_tokens, *_MODELS[model], source, tp, links=dict(links))


def _h100_profiles() -> list[Profile]:
    llama_8b = LinearTerms(1.0, 5.6, 2.88, 0.02021, 4.9e-5, 1.3e-6)
    llama_7b = replace(llama_8b, context_ms=4 * llama_8b.context_ms)
    on_four = LinearTerms(1.0, 14.3, 10.2, 0.0523, 3.06e-5, 1.63e-6, tp_step_ms=1.6, tp_token_ms=0.0087)
    on_eight = LinearTerms(1.0, 8.4, 8.5, 0.0278, 1.53e-5, 8.1e-7, tp_step_ms=1.6, tp_token_ms=0.0102)
    return [
        _profile("h100/llama-3-8b", llama_8b, 427_000, SOURCE_REFERENCE),
        _profile("h100/llama-2-7b", llama_7b, 111_000, SOURCE_FITTED),
        _profile("h100/llama-3-70b", on_four, 451_000, SOURCE_FITTED_70B, tp=4),
        _profile("h100/llama-3-70b", on_eight, 1_330_000, SOURCE_FITTED_70B, tp=8),
    ]


def _a100_profiles() -> list[Profile]:
    context_8b, area_8b = 4.9e-5 * A100_MEMORY_RATIO, 1.3e-6 * A100_COMPUTE_RATIO
    context_70b, area_70b = 1.53e-5 * A100_MEMORY_RATIO, 8.1e-7 * A100_COMPUTE_RATIO
    on_eight = LinearTerms(1.0, 14.2, 5.2, 0.0855, context_70b, area_70b, tp_step_ms=1.6, tp_token_ms=0.0153)
    return [
        _profile("a100/llama-3-8b", LinearTerms(1.0, 9.7, 8.17, 0.06607, context_8b, area_8b), 427_000, SOURCE_FITTED),
        _profile(
            "a100/llama-2-7b", LinearTerms(1.0, 9.3, 2.17, 0.06418, 4 * context_8b, area_8b), 111_000, SOURCE_FITTED
        ),
        _profile("a100/llama-3-70b", on_eight, 1_330_000, SOURCE_FITTED_70B, tp=8),
    ]


def _h200_profile(h100: Profile, kv_pool_tokens: int) -> Profile:
    terms = replace(
        h100.terms,
        floor_ms=h100.terms.floor_ms * H200_MEMORY_RATIO,
        context_ms=h100.terms.context_ms * H200_MEMORY_RATIO,
    )
    source = f"scaled from {h100.name} by memory speed, not measured"
    return replace(h100, device="h200", terms=terms, kv_pool_tokens=kv_pool_tokens, source=source)


def unknown_cpu() -> LinearCost:
    """The prior cost model of an unknown CPU: a slow one, so that first steps are too short rather than too long."""
    return LinearCost(LinearTerms(1.0, 25.0, 12.0, 2.4, 2.5e-3, 6e-5, 0.05), dict(LINKS_CPU))


def _cpu_profiles() -> list[Profile]:
    smollm2 = LinearTerms(0.0, 7.5, 6.5, 0.53, 6e-4, 2.7e-4, 0.1)
    demo = LinearTerms(1.0, 2.0, 1.5, 0.05, 1e-4, 2e-6, 0.02)
    return [
        _profile("cpu/smollm2-135m", smollm2, 65_536, SOURCE_SINGLE_STEPS, links=LINKS_CPU),
        _profile("cpu/demo", demo, 65_536, SOURCE_ESTIMATED, links=LINKS_CPU),
    ]


def _built_in() -> dict[str, Profile]:
    h100 = _h100_profiles()
    h200_pools = {"h100/llama-3-8b": 850_000, "h100/llama-2-7b": 216_000, "h100/llama-3-70b-tp4": 1_120_000}
    h200 = [_h200_profile(profile, h200_pools[profile.name]) for profile in h100 if profile.name in h200_pools]
    return {profile.name: profile for profile in (*h100, *_a100_profiles(), *h200, *_cpu_profiles())}


_PROFILES = _built_in()


def profile_names() -> list[str]:
    """The built-in profiles as `device/model`, sorted."""
    return sorted(_PROFILES)


def get_profile(device: str, model: str) -> Profile:
    """The built-in profile of `model` on `device`. Without `-tpN` in the name, it is the one with the fewest devices.

    Raises ConfigError that lists the profiles if there is none.
    """
    name = f"{device.lower()}/{model.lower()}"
    matches = [found for found in profile_names() if found == name or found.startswith(f"{name}-tp")]
    if not matches:
        raise ConfigError(
            f"there is no cost profile {name!r}; choose one of {', '.join(profile_names())} or --profile FILE"
        )
    return _PROFILES[matches[0]]


def find_profile(name: str) -> Profile:
    """The profile in the file `name` if there is one, else the built-in one called `device/model`.

    Raises ConfigError if there is neither.
    """
    path = Path(name)
    if path.is_file():
        return load_profile(path)
    device, _, model = name.partition("/")
    return get_profile(device, model)


def save_profile(profile: Profile, path: Path) -> None:
    """Write `profile` as JSON."""
    document = {"version": PROFILE_VERSION, **asdict(profile)}
    path.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")


def load_profile(path: Path) -> Profile:
    """The profile in a JSON file as `save_profile` writes it. Raises ConfigError in one line for anything else."""
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read the cost profile {path}: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is not a cost profile: it is not JSON ({error})") from None
    if not isinstance(document, dict) or document.get("version") != PROFILE_VERSION:
        raise ConfigError(
            f"{path} is not a cost profile of version {PROFILE_VERSION}; write one with tokenyard calibrate"
        )
    return _from_document(document, str(path))


def _from_document(document: Mapping[str, object], source: str) -> Profile:
    terms, links, table = document.get("terms"), document.get("links", {}), document.get("table")
    if not isinstance(terms, dict) or not isinstance(links, dict) or not isinstance(table, dict | None):
        raise ConfigError(f"{source}: the cost profile lacks terms; it needs an object of milliseconds")
    values = {key: value for key, value in document.items() if key not in ("version", "terms", "links", "table")}
    try:
        return Profile(
            terms=LinearTerms.from_mapping(terms, source),
            links={name: Link(**link) for name, link in links.items()},
            table=None if table is None else StepTable.from_mapping(table, source),
            **values,  # type: ignore[arg-type]
        )
    except TypeError as error:
        raise ConfigError(f"{source}: the cost profile does not have the expected fields ({error})") from None
