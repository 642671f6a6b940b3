"""AReaL's rollout client: rollouts that go on through a change of weights, memory given back, a folder that is none."""

import asyncio
import shutil
import tempfile
import threading
import time
from collections import Counter
from concurrent.futures import Future
from pathlib import Path
from urllib.parse import urlparse

import torch
from areal.api import ModelRequest, ModelResponse, WeightUpdateMeta
from areal.api.cli_args import GenerationHyperparameters, InferenceEngineConfig, NameResolveConfig
from areal.engine.sglang_remote import RemoteSGLangEngine
from areal.utils import name_resolve, names
from common import Target, expect, try_client
from safetensors.torch import load_file, save_file

PROMPT = list(range(5, 40))
RUN = {"experiment_name": "experiment", "trial_name": "trial"}
WORK = Path(tempfile.mkdtemp(prefix="areal-"))


def engine_of(target: Target) -> RemoteSGLangEngine:
    name_resolve.reconfigure(NameResolveConfig(type="nfs", nfs_record_root=str(WORK / "names")))
    config = InferenceEngineConfig(**RUN, backend="sglang:d1", request_retries=1, request_timeout=60)
    engine = RemoteSGLangEngine(config)
    engine.initialize(addr=urlparse(target.url).netloc, train_data_parallel_size=1)
    return engine


def rollout(engine: RemoteSGLangEngine, tokens: int) -> ModelResponse:
    options = GenerationHyperparameters(n_samples=1, max_new_tokens=tokens, greedy=True, ignore_eos=True)
    return asyncio.run(engine.agenerate(ModelRequest(input_ids=list(PROMPT), gconfig=options)))


def update(engine: RemoteSGLangEngine, folder: str | Path) -> Future[None]:
    # What the trainer notes once it has saved a checkpoint.
    version = engine.get_version()
    note = names.update_weights_from_disk(RUN["experiment_name"], RUN["trial_name"], version)
    name_resolve.add(note, str(time.time()), replace=True)
    meta = WeightUpdateMeta(type="disk", path=str(folder), clear_checkpoint_after_load=False, version=version + 1)
    done = engine.update_weights_from_disk(meta)
    done.result()
    engine.set_version(version + 1)
    return done


def changed(model: str) -> Path:
    """A checkpoint of the same model with other weights."""
    folder = WORK / "changed"
    shutil.copytree(model, folder)
    torch.manual_seed(1)
    for path in folder.glob("*.safetensors"):
        tensors = {
            name: tensor + (tensor.dim() > 1) * 0.02 * torch.randn_like(tensor)
            for name, tensor in load_file(path).items()
        }
        save_file(tensors, path)
    return folder


def weights_under_rollouts(target: Target) -> str:
    engine = engine_of(target)
    before = rollout(engine, 8)
    expect(len(before.output_logprobs) == 8, "a log-probability for each token")
    found: list[ModelResponse] = []
    running = threading.Thread(target=lambda: found.append(rollout(engine, 400)))
    running.start()
    time.sleep(0.2)
    engine.pause()
    engine.pause_generation()
    update(engine, changed(target.tokenizer))
    engine.continue_generation()
    engine.resume()
    running.join()
    expect(len(found[0].output_tokens) == 400, f"{len(found[0].output_tokens)} tokens of the rollout")
    after = rollout(engine, 8)
    expect(after.output_tokens != before.output_tokens, "the weights have not changed")
    engine.offload()
    engine.onload()
    expect(rollout(engine, 8).output_tokens == after.output_tokens, "other weights after the memory came back")
    try:
        update(engine, "/there/is/none")
    except RuntimeError as error:
        expect("400" in str(error), f"refused by {error}")
    else:
        raise AssertionError("a folder that is not there was not refused")
    expect(rollout(engine, 8).output_tokens == after.output_tokens, "a failed update changed the weights")
    update(engine, target.tokenizer)
    expect(rollout(engine, 8).output_tokens == before.output_tokens, "the first weights are not back")
    engine.destroy()
    shutil.rmtree(WORK)
    return f"rollout through a change of weights (tokens by version: {dict(Counter(found[0].output_versions))})"


if __name__ == "__main__":
    try_client("areal", [weights_under_rollouts])
