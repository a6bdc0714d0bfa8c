"""The built-in model in PyTorch: a Llama whose weights the program reads from safetensors."""

import json
import math
import os
import struct

import torch
import torch.nn.functional as F

from books import VOCABULARY

# Sizes of the model that the program contains. `model.json` carries them to the program.
SHAPE = {"dim": 256, "layers": 6, "heads": 6, "kv_heads": 3, "head_dim": 64, "hidden": 448, "rope_theta": 1e7}
TINY = SHAPE | {"dim": 64, "layers": 3, "heads": 2, "kv_heads": 2, "head_dim": 32, "hidden": 96, "rope_theta": 1e4}
EPSILON = 1e-5

# Matrices of a layer: the name in files, and the sizes of outputs and inputs.
MATRICES = {
    "self_attn.q_proj": lambda s: (s["heads"] * s["head_dim"], s["dim"]),
    "self_attn.k_proj": lambda s: (s["kv_heads"] * s["head_dim"], s["dim"]),
    "self_attn.v_proj": lambda s: (s["kv_heads"] * s["head_dim"], s["dim"]),
    "self_attn.o_proj": lambda s: (s["dim"], s["heads"] * s["head_dim"]),
    "mlp.gate_proj": lambda s: (s["hidden"], s["dim"]),
    "mlp.up_proj": lambda s: (s["hidden"], s["dim"]),
    "mlp.down_proj": lambda s: (s["dim"], s["hidden"]),
}
NORMS = ["input_layernorm", "post_attention_layernorm"]


def attribute(name):
    """The parameter of a part: names of parameters have no dots."""
    return name.replace(".", "_")


def queries_keys_values(x, norm, q, k, v, cosines, sines, head_dim):
    """Queries, keys and values of tokens, each `[token][head][element]`; queries and keys turned by their positions."""
    normed = F.rms_norm(x, x.shape[-1:], norm, EPSILON).to(q.dtype)
    heads = [F.linear(normed, matrix).unflatten(-1, (-1, head_dim)) for matrix in (q, k, v)]
    turned = []
    for head in heads[:2]:
        # A pair is an element of the head's first half and one of its second.
        one, other = head.float().chunk(2, -1)
        turned.append(torch.cat([one * cosines - other * sines, other * cosines + one * sines], -1).to(q.dtype))
    return *turned, heads[2]


def rest_of_layer(x, found, norm, o, gate, up, down):
    """Adds what attention found, and the feed-forward part."""
    x = x + F.linear(found, o)
    normed = F.rms_norm(x, x.shape[-1:], norm, EPSILON).to(o.dtype)
    return x + F.linear(F.silu(F.linear(normed, gate)) * F.linear(normed, up), down)


class Llama(torch.nn.Module):
    """All layers' weights of a kind are in one parameter, `[layer][output][input]`, which the optimizer uses."""

    def __init__(self, shape):
        super().__init__()
        self.shape = shape
        layers = shape["layers"]
        self.embeddings = torch.nn.Parameter(torch.randn(VOCABULARY, shape["dim"]) / math.sqrt(shape["dim"]))
        self.final_norm = torch.nn.Parameter(torch.ones(shape["dim"]))
        for name in NORMS:
            self.register_parameter(name, torch.nn.Parameter(torch.ones(layers, shape["dim"])))
        for name, size in MATRICES.items():
            outputs, inputs = size(shape)
            ends_branch = name in ("self_attn.o_proj", "mlp.down_proj")
            scale = 1 / math.sqrt(inputs) / (math.sqrt(2 * layers) if ends_branch else 1)
            weights = torch.randn(layers, outputs, inputs) * scale
            self.register_parameter(attribute(name), torch.nn.Parameter(weights))
        self.parts = (queries_keys_values, rest_of_layer)

    def compile(self):
        """Compiles the parts around attention. Their sizes depend on the number of tokens alone."""
        self.parts = tuple(torch.compile(part, dynamic=False) for part in (queries_keys_values, rest_of_layer))

    def hidden(self, tokens, dtype):
        """What the last layer gives for `[text][token]`, normed; matrix products are computed in `dtype`."""
        shape, (texts, length) = self.shape, tokens.shape
        head_dim, half, group = shape["head_dim"], shape["head_dim"] // 2, shape["heads"] // shape["kv_heads"]
        exponents = torch.arange(half, device=tokens.device, dtype=torch.float64) / half
        angles = torch.arange(length, device=tokens.device)[:, None] * shape["rope_theta"] ** -exponents
        # `[token][1][pair]`, for all tokens of all texts.
        cosines, sines = (part.float().repeat(texts, 1).unsqueeze(1) for part in (angles.cos(), angles.sin()))
        weights = {name: getattr(self, attribute(name)).to(dtype) for name in MATRICES}
        before, after = self.parts
        x = F.embedding(tokens.flatten(), self.embeddings)
        for layer in range(shape["layers"]):
            q, k, v, o, gate, up, down = (weights[name][layer] for name in MATRICES)
            heads = before(x, self.input_layernorm[layer], q, k, v, cosines, sines, head_dim)
            queries, keys, values = (head.unflatten(0, (texts, length)).transpose(1, 2) for head in heads)
            # Not `enable_gqa`: kernels for f32 do not have it.
            keys, values = (head.repeat_interleave(group, 1) for head in (keys, values))
            found = F.scaled_dot_product_attention(queries, keys, values, is_causal=True)
            found = found.transpose(1, 2).reshape(texts * length, -1)
            x = after(x, found, self.post_attention_layernorm[layer], o, gate, up, down)
        return F.rms_norm(x, x.shape[-1:], self.final_norm, EPSILON).unflatten(0, (texts, length))

    def logits(self, hidden):
        return F.linear(hidden, self.embeddings.to(hidden.dtype))

    def tensors(self):
        """The weights under the names that Hugging Face gives them."""
        found = {"model.embed_tokens": self.embeddings, "model.norm": self.final_norm}
        for layer in range(self.shape["layers"]):
            for name in [*MATRICES, *NORMS]:
                found[f"model.layers.{layer}.{name}"] = getattr(self, attribute(name))[layer]
        return {f"{name}.weight": found[name].detach() for name in sorted(found)}

    @torch.no_grad()
    def read(self, path):
        """Takes weights that `write_safetensors` has written."""
        found = read_safetensors(path)
        for name, tensor in self.tensors().items():
            tensor.copy_(found[name])


def write_safetensors(path, tensors):
    """Writes a length, a header in JSON, and the numbers in bf16."""
    header, data = {"__metadata__": {"format": "pt"}}, []
    begin = 0
    for name, tensor in tensors.items():
        raw = tensor.to(torch.bfloat16).contiguous().cpu().view(torch.int16).numpy().tobytes()
        header[name] = {"dtype": "BF16", "shape": list(tensor.shape), "data_offsets": [begin, begin + len(raw)]}
        begin += len(raw)
        data.append(raw)
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    unfinished = path.with_suffix(".part")
    unfinished.write_bytes(struct.pack("<Q", len(text)) + text + b"".join(data))
    os.replace(unfinished, path)


def read_safetensors(path):
    """The tensors of a file in bf16."""
    data = path.read_bytes()
    length, = struct.unpack("<Q", data[:8])
    found = {}
    for name, entry in json.loads(data[8:8 + length]).items():
        if name != "__metadata__":
            begin, end = (8 + length + offset for offset in entry["data_offsets"])
            tensor = torch.frombuffer(bytearray(data[begin:end]), dtype=torch.bfloat16)
            found[name] = tensor.view(entry["shape"])
    return found
