"""Turns the stories260K checkpoint (llama2.c's format) into a Hugging Face folder with its tokenizer."""

import json
import struct
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, processors

SOURCE = Path(__file__).resolve().parents[2] / "../shared/models/stories260K"

_HEADER = struct.Struct("<7i")


def convert(target: Path, source: Path = SOURCE) -> None:
    """Write config.json, model.safetensors, tokenizer.json and generation_config.json to `target`."""
    target.mkdir(parents=True, exist_ok=True)
    blob = (source / "stories260K.bin").read_bytes()
    dim, hidden, layers, heads, kv_heads, vocab, context = _HEADER.unpack_from(blob)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": dim,
        "intermediate_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "vocab_size": vocab,
        "max_position_embeddings": context,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": True,
        "torch_dtype": "float32",
        "bos_token_id": 1,
        # The model says BOS where a story ends.
        "eos_token_id": [1, 2],
    }
    (target / "config.json").write_text(json.dumps(config, indent=2))
    (target / "generation_config.json").write_text(json.dumps({"bos_token_id": 1, "eos_token_id": [1, 2]}))
    save_file(_tensors(np.frombuffer(blob, "<f4", offset=_HEADER.size), config), target / "model.safetensors")
    pieces, scores = read_pieces(source / "tok512.bin", vocab)
    build_tokenizer(pieces, scores).save(str(target / "tokenizer.json"))
    tokenizer_config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "unk_token": "<unk>",
        "model_max_length": context,
    }
    (target / "tokenizer_config.json").write_text(json.dumps(tokenizer_config, indent=2))


def _tensors(values: np.ndarray, config: dict) -> dict[str, torch.Tensor]:
    dim, hidden, layers = config["hidden_size"], config["intermediate_size"], config["num_hidden_layers"]
    head_dim = dim // config["num_attention_heads"]
    kv_dim = config["num_key_value_heads"] * head_dim
    offset = 0

    def take(*shape: int) -> torch.Tensor:
        nonlocal offset
        size = int(np.prod(shape))
        tensor = torch.from_numpy(values[offset : offset + size].reshape(shape).copy())
        offset += size
        return tensor

    tensors = {"model.embed_tokens.weight": take(config["vocab_size"], dim)}
    order = (
        ("input_layernorm", (dim,)),
        ("self_attn.q_proj", (dim, dim)),
        ("self_attn.k_proj", (kv_dim, dim)),
        ("self_attn.v_proj", (kv_dim, dim)),
        ("self_attn.o_proj", (dim, dim)),
        ("post_attention_layernorm", (dim,)),
        ("mlp.gate_proj", (hidden, dim)),
        ("mlp.down_proj", (dim, hidden)),
        ("mlp.up_proj", (hidden, dim)),
    )
    for name, shape in order:
        for layer, tensor in enumerate(take(layers, *shape)):
            if name in ("self_attn.q_proj", "self_attn.k_proj"):
                tensor = _half_split(tensor, head_dim)
            tensors[f"model.layers.{layer}.{name}.weight"] = tensor.clone()
    tensors["model.norm.weight"] = take(dim)
    return tensors


def _half_split(weight: torch.Tensor, head_dim: int) -> torch.Tensor:
    """Reorder each head's outputs from neighbouring pairs to halves, which is how HF checkpoints rotate."""
    return weight.view(-1, head_dim // 2, 2, weight.shape[1]).transpose(1, 2).reshape(weight.shape)


def read_pieces(path: Path, vocab: int) -> tuple[list[bytes], list[float]]:
    """Read tok512.bin: the pieces and their scores."""
    blob = path.read_bytes()
    offset, pieces, scores = 4, [], []
    for _ in range(vocab):
        score, length = struct.unpack_from("<fi", blob, offset)
        pieces.append(blob[offset + 8 : offset + 8 + length])
        scores.append(score)
        offset += 8 + length
    return pieces, scores


def build_tokenizer(pieces: list[bytes], scores: list[float]) -> Tokenizer:
    """SentencePiece-style BPE: a dummy leading space, bytes for what is unknown, merges in the order of scores."""
    names = [_name(index, piece) for index, piece in enumerate(pieces)]
    vocab = {name: index for index, name in enumerate(names)}
    merges = []
    for index, name in enumerate(names):
        if index > 258:
            cuts = [(name[:at], name[at:]) for at in range(1, len(name))]
            merges += [(scores[index], pair) for pair in cuts if pair[0] in vocab and pair[1] in vocab]
    merges.sort(key=lambda merge: -merge[0])
    tokenizer = Tokenizer(
        models.BPE(
            vocab=vocab,
            merges=[pair for _, pair in merges],
            unk_token="<unk>",
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens([AddedToken(name, special=True) for name in ("<unk>", "<s>", "</s>")])
    return tokenizer


def _name(index: int, piece: bytes) -> str:
    if index < 3:
        return ("<unk>", "<s>", "</s>")[index]
    if index < 259:
        return f"<0x{index - 3:02X}>"
    return piece.decode("utf-8").replace(" ", "▁")
