"""Makes EAGLE heads in the forms of their checkpoints, and computes them in float32 as the papers say."""

import json
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import save_file

SHAPE = {
    **{"num_attention_heads": 3, "num_key_value_heads": 1, "head_dim": 16, "intermediate_size": 64},
    **{"num_hidden_layers": 1, "max_position_embeddings": 64, "rms_norm_eps": 1e-5, "rope_theta": 500.0},
}


def head_config(vocab_size, hidden_size, **fields):
    """A config.json; with draft_vocab_size it is that of an EAGLE-3 head."""
    config = {"architectures": ["LlamaForCausalLM"], "vocab_size": vocab_size, "hidden_size": hidden_size}
    return {**config, **SHAPE, **fields}


def head_tensors(config, *, layer, aux=0, biases=(), lm_head=True, seed=0):
    """Random tensors of a head, of the first EAGLE where it reads no `aux` layers. biases: products that have one."""
    hidden, dim = config["hidden_size"], config["head_dim"]
    heads, kv_heads, inter = (
        config[name] for name in ("num_attention_heads", "num_key_value_heads", "intermediate_size")
    )
    wide = 2 * hidden if aux else hidden
    products = {
        "fc": (hidden, (aux or 2) * hidden),
        f"{layer}self_attn.q_proj": (heads * dim, wide),
        f"{layer}self_attn.k_proj": (kv_heads * dim, wide),
        f"{layer}self_attn.v_proj": (kv_heads * dim, wide),
        f"{layer}self_attn.o_proj": (hidden, heads * dim),
        f"{layer}mlp.gate_proj": (inter, hidden),
        f"{layer}mlp.up_proj": (inter, hidden),
        f"{layer}mlp.down_proj": (hidden, inter),
    }
    norms = [f"{layer}post_attention_layernorm"]
    if aux:
        norms += [f"{layer}input_layernorm", f"{layer}hidden_norm", "norm"]
        if lm_head:
            products["lm_head"] = config["draft_vocab_size"], hidden
    draw = torch.Generator().manual_seed(seed)
    tensors = {f"{name}.weight": torch.randn(shape, generator=draw) * 0.3 for name, shape in products.items()}
    tensors |= {f"{name}.weight": 1.0 + 0.1 * torch.randn(hidden, generator=draw) for name in norms}
    own = [name for name in products if name.endswith(tuple(biases))] if biases else []
    tensors |= {f"{name}.bias": torch.randn(products[name][0], generator=draw) for name in own}
    count = config.get("draft_vocab_size", 0)
    if aux and count < config["vocab_size"]:
        ids = torch.randperm(config["vocab_size"], generator=draw)[:count].sort().values
        tensors["d2t"] = ids - torch.arange(count)
        tensors["t2d"] = torch.zeros(config["vocab_size"], dtype=torch.bool).scatter_(0, ids, True)
    return tensors


def save_head(folder, config, tensors):
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    return str(folder)


class HeadJudge:
    """A head next to a model of transformers, in float32, without cache.

    layer: the beginning of the names of its layer. aux: of the model's hidden states, which an EAGLE-3 head reads, the
    embedding's is 0. before: whether the norm is before the residual.
    """

    def __init__(self, model, config, tensors, layer, aux=(), before=False):
        self.model, self.config, self.tensors, self.layer = model, config, tensors, layer
        self.aux, self.before = aux, before

    @torch.inference_mode()
    def drafts(self, ids, count):
        """What the head drafts after `ids`, each draft from the one before."""
        out = self.model.model(torch.tensor([ids]), output_hidden_states=True)
        features = out.last_hidden_state[0, :-1]
        if self.aux:
            features = self.product("fc", torch.cat([out.hidden_states[layer][0, :-1] for layer in self.aux], dim=-1))
        ids, found = list(ids), []
        for _ in range(count):
            predicted = self.forward(features, torch.tensor(ids[1:]))[-1:]
            found.append(self.likeliest(predicted))
            ids.append(found[-1])
            features = torch.cat((features, predicted))
        return found

    def likeliest(self, predicted):
        if not self.aux:
            return int(self.model.lm_head(predicted).argmax())
        normed = self.norm("norm", predicted)
        if "lm_head.weight" not in self.tensors:
            return int(self.model.lm_head(normed).argmax())
        own = int(self.product("lm_head", normed).argmax())
        return own + int(self.tensors["d2t"][own]) if "d2t" in self.tensors else own

    def forward(self, features, tokens):
        """[T, hidden] of features at positions 0.. and the tokens after them."""
        embedded = self.model.get_input_embeddings().weight[tokens]
        if self.aux:
            normed = self.norm(f"{self.layer}hidden_norm", features)
            x = normed if self.before else features
            read = torch.cat((self.norm(f"{self.layer}input_layernorm", embedded), normed), dim=-1)
        else:
            x = read = self.product("fc", torch.cat((embedded, features), dim=-1))
        x = x + self.attend(read)
        normed = self.norm(f"{self.layer}post_attention_layernorm", x)
        gate, up = (self.product(f"{self.layer}mlp.{name}_proj", normed) for name in ("gate", "up"))
        return x + self.product(f"{self.layer}mlp.down_proj", F.silu(gate) * up)

    def attend(self, read):
        dim, positions = self.config["head_dim"], torch.arange(len(read), dtype=torch.float32)
        q, k, v = (self.product(f"{self.layer}self_attn.{name}_proj", read).view(len(read), -1, dim) for name in "qkv")
        angles = torch.outer(positions, self.config["rope_theta"] ** (-torch.arange(0, dim, 2) / dim))
        q, k = rotated(q, angles), rotated(k, angles)
        group = q.shape[1] // k.shape[1]
        k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
        scores = torch.einsum("qhd,khd->hqk", q, k) * dim**-0.5
        later = torch.ones(len(read), len(read), dtype=torch.bool).triu(1)
        weights = scores.masked_fill(later, float("-inf")).softmax(dim=-1)
        return self.product(f"{self.layer}self_attn.o_proj", torch.einsum("hqk,khd->qhd", weights, v).flatten(1))

    def product(self, name, x):
        return F.linear(x, self.tensors[f"{name}.weight"], self.tensors.get(f"{name}.bias"))

    def norm(self, name, x):
        mean = x.square().mean(dim=-1, keepdim=True)
        return x * torch.rsqrt(mean + self.config["rms_norm_eps"]) * self.tensors[f"{name}.weight"]


def rotated(x, angles):
    first, second = x.chunk(2, dim=-1)
    cos, sin = angles.cos()[:, None], angles.sin()[:, None]
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
