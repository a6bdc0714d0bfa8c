"""A folder with a tiny model in Hugging Face's layout, of which clients need the tokenizer.

Its tokens are those of the built-in model: bytes, and the marks after them, the first of which
begins every text. Its weights are random, and so are its answers; its chat template supports tools.
"""

import json
import pathlib
import random
import struct

BYTES = 256
MARKS = ["<|begin|>", "<|end|>", "<|system|>", "<|user|>", "<|assistant|>", "<|end_of_message|>"]
BEGIN, END, END_OF_MESSAGE = BYTES, BYTES + 1, BYTES + 5
VOCABULARY = BYTES + len(MARKS)
HIDDEN, FEED_FORWARD, LAYERS, HEADS, KV_HEADS, HEAD = 64, 96, 2, 4, 2, 16
POSITIONS = 4096

CHAT_TEMPLATE = """\
{{- bos_token }}
{%- if tools %}
    {{- '<|system|>You may call these functions:' }}
    {%- for tool in tools %}
        {{- '\\n' + tool.function | tojson }}
    {%- endfor %}
    {{- '<|end_of_message|>' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'tool' %}
        {{- '<|user|>' + message.tool_call_id + ' returned ' + message.content }}
    {%- else %}
        {{- '<|' + message.role + '|>' }}
        {%- if message.content is string %}
            {{- message.content }}
        {%- endif %}
        {%- for call in message.tool_calls or [] %}
            {{- '<tool_call>\\n' }}
            {{- {'name': call.function.name, 'arguments': call.function.arguments} | tojson }}
            {{- '\\n</tool_call>' }}
        {%- endfor %}
    {%- endif %}
    {{- '<|end_of_message|>' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|assistant|>' }}
{%- endif %}
"""


def make_model(folder):
    """Writes all files that a server needs."""
    folder = pathlib.Path(folder)
    make_tokenizer(folder)
    (folder / "config.json").write_text(json.dumps(config()))
    (folder / "model.safetensors").write_bytes(weights())


def make_tokenizer(folder):
    """Writes all files that a client needs."""
    folder = pathlib.Path(folder)
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer()))
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer_config()))
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE)


def config():
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "bos_token_id": BEGIN,
        "eos_token_id": [END, END_OF_MESSAGE],
        "vocab_size": VOCABULARY,
        "hidden_size": HIDDEN,
        "intermediate_size": FEED_FORWARD,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD,
        "max_position_embeddings": POSITIONS,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "dtype": "bfloat16",
    }


def tokenizer():
    mark = dict(single_word=False, lstrip=False, rstrip=False, normalized=False, special=True)
    begin = {"SpecialToken": {"id": MARKS[0], "type_id": 0}}
    first, second = ({"Sequence": {"id": name, "type_id": 0}} for name in "AB")
    byte_level = dict(type="ByteLevel", add_prefix_space=False, trim_offsets=False, use_regex=False)
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [{"id": BYTES + i, "content": text, **mark} for i, text in enumerate(MARKS)],
        "normalizer": None,
        "pre_tokenizer": byte_level,
        "post_processor": {
            "type": "TemplateProcessing",
            "single": [begin, first],
            "pair": [begin, first, second],
            "special_tokens": {MARKS[0]: {"id": MARKS[0], "ids": [BEGIN], "tokens": [MARKS[0]]}},
        },
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": {letter: byte for byte, letter in enumerate(letters_of_bytes())},
            "merges": [],
        },
    }


def tokenizer_config():
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": MARKS[0],
        "eos_token": MARKS[1],
        "extra_special_tokens": MARKS[2:],
        "clean_up_tokenization_spaces": False,
        "model_max_length": POSITIONS,
    }


def letters_of_bytes():
    """Returns the characters by which byte-level vocabularies represent each byte: printable bytes
    represent themselves."""
    seen = {*range(33, 127), *range(161, 173), *range(174, 256)}
    unseen = (chr(BYTES + place) for place in range(BYTES))
    return [chr(byte) if byte in seen else next(unseen) for byte in range(BYTES)]


def weights():
    """Returns the bytes of a safetensors file."""
    shapes = {"model.embed_tokens.weight": (VOCABULARY, HIDDEN)}
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}"
        shapes |= {
            f"{prefix}.input_layernorm.weight": (HIDDEN,),
            f"{prefix}.self_attn.q_proj.weight": (HEADS * HEAD, HIDDEN),
            f"{prefix}.self_attn.k_proj.weight": (KV_HEADS * HEAD, HIDDEN),
            f"{prefix}.self_attn.v_proj.weight": (KV_HEADS * HEAD, HIDDEN),
            f"{prefix}.self_attn.o_proj.weight": (HIDDEN, HEADS * HEAD),
            f"{prefix}.post_attention_layernorm.weight": (HIDDEN,),
            f"{prefix}.mlp.gate_proj.weight": (FEED_FORWARD, HIDDEN),
            f"{prefix}.mlp.up_proj.weight": (FEED_FORWARD, HIDDEN),
            f"{prefix}.mlp.down_proj.weight": (HIDDEN, FEED_FORWARD),
        }
    shapes |= {"model.norm.weight": (HIDDEN,), "lm_head.weight": (VOCABULARY, HIDDEN)}

    draw = random.Random(5)
    header, data = {}, bytearray()
    for name, shape in shapes.items():
        start = len(data)
        for row in range(shape[0]):
            data += values(name, row, shape, draw)
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [start, len(data)]}
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + bytes(data)


def values(name, row, shape, draw):
    """One row of a matrix, or one number of a vector, as bfloat16: the upper half of a float."""
    if len(shape) == 1:
        numbers = [1.0]
    elif name.startswith("lm_head") and not 32 <= row <= 126:
        # Only readable text: tokens without weights have logits below the highest of the others.
        numbers = [0.0] * shape[1]
    else:
        numbers = [draw.gauss(0, 0.15) for _ in range(shape[1])]
    return b"".join(struct.pack("<f", number)[2:] for number in numbers)
