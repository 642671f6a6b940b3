"""lm-eval's local-completions: log-likelihoods and generation over a task made of local lines."""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from common import Target, expect, try_client

LINES = [
    {"question": "The cat sat on the", "choices": [" mat.", " seven."], "gold": 0},
    {"question": "Once upon a", "choices": [" time", " xylophone"], "gold": 0},
    {"question": "The sun is", "choices": [" purple and", " bright"], "gold": 1},
]
CHOOSE = """
task: choose
dataset_path: json
dataset_kwargs: {data_files: {test: lines.jsonl}}
output_type: multiple_choice
test_split: test
doc_to_text: "{{question}}"
doc_to_choice: choices
doc_to_target: gold
target_delimiter: ""
metric_list: [{metric: acc}]
"""
WRITE = """
task: write
dataset_path: json
dataset_kwargs: {data_files: {test: lines.jsonl}}
output_type: generate_until
test_split: test
doc_to_text: "{{question}}"
doc_to_target: "{{choices[gold]}}"
generation_kwargs: {until: ["."], max_gen_toks: 12, temperature: 0.0}
metric_list: [{metric: exact_match}]
"""


def log_likelihoods_and_generation(target: Target) -> str:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "lines.jsonl").write_text("\n".join(map(json.dumps, LINES)))
        (folder / "choose.yaml").write_text(CHOOSE)
        (folder / "write.yaml").write_text(WRITE)
        model = f"model={target.model},base_url={target.v1}/completions,tokenizer={target.tokenizer}"
        command = [
            *(str(Path(sys.executable).parent / "lm_eval"), "--model", "local-completions"),
            *("--model_args", f"{model},tokenizer_backend=huggingface,num_concurrent=2,max_length=1024"),
            *("--tasks", "choose,write", "--include_path", "."),
            *("--output_path", "out", "--log_samples"),
        ]
        environment = {**os.environ, "HF_HOME": str(folder / "hf"), "HF_HUB_OFFLINE": "1"}
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=240, env=environment)
        expect(done.returncode == 0, f"lm_eval ended with {done.returncode}: {(done.stdout + done.stderr)[-800:]}")
        results = json.loads(next((folder / "out").rglob("results*.json")).read_text())["results"]
        samples = next((folder / "out").rglob("samples_choose*")).read_text().splitlines()
    scores = [float(answer[0]) for line in samples for answer in json.loads(line)["filtered_resps"]]
    expect(len(scores) == 6 and all(score < 0 for score in scores), f"log-likelihoods {scores}")
    return f"6 log-likelihoods, accuracy {results['choose']['acc,none']:.2f}, 3 answers generated"


if __name__ == "__main__":
    try_client("lm_eval", [log_likelihoods_and_generation])
