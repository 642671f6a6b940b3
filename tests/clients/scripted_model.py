"""A checkpoint that answers every prompt with the same text, so that an agent can be driven without a large model.

It is a Llama of one layer whose attention and MLP add nothing: the next token depends on the last one only. Prompts end
with some token of the demo model's vocabulary, after which comes one added token that holds the whole text, then the
end of the turn. Everything else is real: tokens of prompts, KV, prefix cache.
"""

import json
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from tokenyard.config import DEMO_MODEL

HIDDEN, LOGIT = 16, 64.0
SAY, END, VOCABULARY = 2048, 6, 2064
TEMPLATE = (
    "{{ bos_token }}{% if tools %}<|system|># Tools, each called within <tool_call></tool_call>:"
    "{% for tool in tools %}\n{{ tool | tojson }}{% endfor %}<|end|>{% endif %}"
    "{% for message in messages %}<|{{ message['role'] if message['role'] in ['system', 'assistant'] else 'user' }}|>"
    "{{ message['content'] or '' }}{% for call in message['tool_calls'] or [] %}<tool_call>\n"
    "{{ {'name': call['function']['name'], 'arguments': call['function']['arguments']} | tojson }}"
    "\n</tool_call>{% endfor %}<|end|>{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def tool_call(name: str, **arguments: str) -> str:
    """The text of a call, as models in the style of Hermes and Qwen write it."""
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def write_model(folder: Path, text: str, context: int) -> Path:
    """Write the checkpoint that says `text`, with so many positions, to `folder`."""
    folder.mkdir(parents=True)
    config = json.loads((DEMO_MODEL / "config.json").read_text())
    config |= {
        "vocab_size": VOCABULARY,
        "hidden_size": HIDDEN,
        "intermediate_size": HIDDEN,
        "num_hidden_layers": 1,
        "num_attention_heads": 1,
        "num_key_value_heads": 1,
        "head_dim": HIDDEN,
        "max_position_embeddings": context,
        "tie_word_embeddings": False,
        "dtype": "float32",
    }
    (folder / "config.json").write_text(json.dumps(config))
    tokenizer = json.loads((DEMO_MODEL / "tokenizer.json").read_text())
    added = {**tokenizer["added_tokens"][0], "id": SAY, "content": text, "special": False}
    tokenizer["added_tokens"].append(added)
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    settings = json.loads((DEMO_MODEL / "tokenizer_config.json").read_text())
    settings |= {"chat_template": TEMPLATE, "model_max_length": context}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    embedding = np.zeros((VOCABULARY, HIDDEN), np.float32)
    embedding[:, 0] = 1.0
    embedding[SAY] = np.eye(HIDDEN, dtype=np.float32)[1]
    head = np.zeros((VOCABULARY, HIDDEN), np.float32)
    head[SAY, 0] = head[END, 1] = LOGIT
    square, ones = np.zeros((HIDDEN, HIDDEN), np.float32), np.ones(HIDDEN, np.float32)
    layer = {f"self_attn.{name}_proj.weight": square for name in "qkvo"}
    layer |= {f"mlp.{name}_proj.weight": square for name in ("gate", "up", "down")}
    layer |= {"input_layernorm.weight": ones, "post_attention_layernorm.weight": ones}
    weights = {f"model.layers.0.{name}": value for name, value in layer.items()}
    weights |= {"model.embed_tokens.weight": embedding, "model.norm.weight": ones, "lm_head.weight": head}
    save_file(weights, folder / "model.safetensors")
    return folder
