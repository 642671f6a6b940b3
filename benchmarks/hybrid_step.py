"""Steps of a model with recurrent states on a CPU: native steps, torch's layers and transformers, by processor time.

Run from the repository root: `python -m benchmarks.hybrid_step [--family qwen3.5] [--layers 8]`.
A checkpoint of Qwen3.5-0.8B's shape, of Granite 4.0-H-350M's or of LFM2-350M's, with fewer layers, a smaller vocabulary
and random weights in float32. All compute with one thread: a prompt of 512 tokens, then tokens one by one. Of several
rounds the least processor time counts, as other work on the machine only adds some. Greedy tokens of all must agree.
"""

import argparse
import tempfile
import time
from collections.abc import Callable

import numpy as np
import torch

VOCABULARY, PROMPT, DECODES = 16_000, 512, 24


def config_of(family: str, layers: int):
    """A transformers config of the shape."""
    from transformers import GraniteMoeHybridConfig, Lfm2Config, Qwen3_5TextConfig

    common = {"vocab_size": VOCABULARY, "num_hidden_layers": layers, "tie_word_embeddings": True}
    if family == "qwen3.5":
        return Qwen3_5TextConfig(
            **common,
            **{"hidden_size": 1024, "intermediate_size": 3584, "num_attention_heads": 8, "num_key_value_heads": 2},
            **{"head_dim": 256, "linear_num_key_heads": 16, "linear_num_value_heads": 16},
            **{"linear_key_head_dim": 128, "linear_value_head_dim": 128},
        )
    if family == "granite":
        kinds = ["full_attention" if layer % 8 == 5 else "linear_attention" for layer in range(layers)]
        return GraniteMoeHybridConfig(
            **common,
            **{"hidden_size": 768, "shared_intermediate_size": 2048, "num_attention_heads": 12},
            **{"num_key_value_heads": 4, "num_local_experts": 0, "layer_types": kinds, "mamba_n_heads": 48},
            **{"mamba_d_head": 32, "mamba_d_state": 128, "mamba_n_groups": 1, "position_embedding_type": "nope"},
        )
    kinds = ["full_attention" if layer % 3 == 2 else "conv" for layer in range(layers)]
    return Lfm2Config(
        **common,
        **{"hidden_size": 1024, "intermediate_size": 6656, "num_attention_heads": 16, "num_key_value_heads": 8},
        **{"layer_types": kinds},
    )


def cpu_s(call: Callable[[], object]) -> float:
    """Processor seconds of a call."""
    begin = time.process_time()
    call()
    return time.process_time() - begin


class Ours:
    """An executor that runs one row."""

    def __init__(self, folder: str, model_impl: str) -> None:
        from tokenyard.executor.model_loader import load_executor

        self._executor = load_executor(
            folder,
            device="cpu",
            dtype="float32",
            max_total_tokens=2048,
            max_pool_rows=1,
            context_length=1024,
            threads=1,
            model_impl=model_impl,
        )

    def run(self, prompt: list[int]) -> tuple[float, float, list[int]]:
        """Processor seconds of the prompt and of a token, and the tokens."""
        from tests.executor.driver import Driver

        driver = Driver(self._executor)
        sequence = driver.start(prompt)
        prefill = cpu_s(lambda: driver.step((sequence, None)))
        decode = cpu_s(lambda: [driver.step((sequence, 1)) for _ in range(DECODES)])
        return prefill, decode / DECODES, sequence.known[len(prompt) :]


class Transformers:
    """The judge, with its cache."""

    def __init__(self, folder: str) -> None:
        from transformers import AutoModelForCausalLM

        self._model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()

    @torch.inference_mode()
    def run(self, prompt: list[int]) -> tuple[float, float, list[int]]:
        """See Ours.run."""
        tokens, past = list[int](), None

        def step(ids: list[int]) -> None:
            nonlocal past
            found = self._model(torch.tensor([ids]), past_key_values=past, use_cache=True, logits_to_keep=1)
            past = found.past_key_values
            tokens.append(int(found.logits[0, -1].argmax()))

        prefill = cpu_s(lambda: step(prompt))
        decode = cpu_s(lambda: [step(tokens[-1:]) for _ in range(DECODES)])
        return prefill, decode / DECODES, tokens


def main() -> None:
    """Measure the three in turns, and print the least time of each."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--family", default="qwen3.5", choices=["qwen3.5", "granite", "lfm2"])
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    from transformers import AutoModelForCausalLM

    with tempfile.TemporaryDirectory() as folder:
        model = AutoModelForCausalLM.from_config(config_of(options.family, options.layers))
        model.save_pretrained(folder)
        del model
        systems = {
            "native steps": Ours(folder, "native"),
            "torch's layers": Ours(folder, "torch"),
            "transformers": Transformers(folder),
        }
        prompt = np.random.default_rng(0).integers(0, VOCABULARY, PROMPT).tolist()
        found = {name: [system.run(prompt) for _ in range(options.rounds)] for name, system in systems.items()}
    judge = found["transformers"][0][2]
    for name, runs in found.items():
        prefill, decode = (min(run[place] for run in runs) for place in (0, 1))
        same = sum(ours == theirs for ours, theirs in zip(runs[0][2], judge, strict=False))
        print(
            f"{name:15s} prompt {PROMPT / prefill:7.0f} tok/s, decode {decode * 1e3:7.2f} ms a token; "
            f"{same} of {len(judge)} tokens are transformers'",
            flush=True,
        )


if __name__ == "__main__":
    main()
