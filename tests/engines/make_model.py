"""A tiny Llama as a folder that engines load: random weights that give lively answers, and a tokenizer of bytes.

    python make_model.py FOLDER
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

HIDDEN, LAYERS, VOCABULARY, INNER, HEADS, KV_HEADS, HEAD = 256, 4, 512, 512, 4, 2, 64
SPECIAL = ("<s>", "</s>", "<unk>")


def config() -> dict[str, object]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": HIDDEN,
        "intermediate_size": INNER,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD,
        "vocab_size": VOCABULARY,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "torch_dtype": "float32",
        "attention_bias": False,
        "mlp_bias": False,
    }


def weights(seed: int) -> dict[str, torch.Tensor]:
    random = torch.Generator().manual_seed(seed)

    def matrix(rows: int, columns: int, scale: float = 0.05) -> torch.Tensor:
        return torch.randn(rows, columns, generator=random) * scale

    made = {
        "model.embed_tokens.weight": matrix(VOCABULARY, HIDDEN, 1.0),
        "model.norm.weight": torch.ones(HIDDEN),
        "lm_head.weight": matrix(VOCABULARY, HIDDEN, 0.2),
    }
    for layer in range(LAYERS):
        name = f"model.layers.{layer}."
        made |= {
            # Large enough that attention looks at single tokens: wrong KV shows in the answer.
            f"{name}self_attn.q_proj.weight": matrix(HEADS * HEAD, HIDDEN, 0.15),
            f"{name}self_attn.k_proj.weight": matrix(KV_HEADS * HEAD, HIDDEN, 0.15),
            f"{name}self_attn.v_proj.weight": matrix(KV_HEADS * HEAD, HIDDEN),
            f"{name}self_attn.o_proj.weight": matrix(HIDDEN, HEADS * HEAD),
            f"{name}mlp.gate_proj.weight": matrix(INNER, HIDDEN),
            f"{name}mlp.up_proj.weight": matrix(INNER, HIDDEN),
            f"{name}mlp.down_proj.weight": matrix(HIDDEN, INNER),
            f"{name}input_layernorm.weight": torch.ones(HIDDEN),
            f"{name}post_attention_layernorm.weight": torch.ones(HIDDEN),
        }
    return made


def write(folder: Path, seed: int = 0) -> Path:
    """Writes the model there; another seed gives another model."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config(), indent=1))
    save_file(weights(seed), folder / "model.safetensors", metadata={"format": "pt"})
    names = [*SPECIAL, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    names += [f"<unused {place}>" for place in range(len(names), VOCABULARY)]
    vocabulary = {name: place for place, name in enumerate(names)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(SPECIAL))
    tokenizer.save(str(folder / "tokenizer.json"))
    told = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "unk_token": "<unk>",
        "model_max_length": 4096,
        "chat_template": "{% for message in messages %}{{ message['content'] }}{% endfor %}",
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(told))
    return folder


if __name__ == "__main__":
    write(Path(sys.argv[1]))
