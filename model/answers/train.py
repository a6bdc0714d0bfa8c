#!/usr/bin/env python3
"""Trains the model that comes with the program.

It reads a book of fields and answers questions about its rows, adds numbers and continues sequences. All text that it
sees is made up here, on the device that it is trained on, and never twice:

    Row 17: barley, kept by Ada Finch.
    ...
    Who keeps row 17?
    Ada Finch

Time is what limits the training, so the length of texts and the learning rate follow the clock. The weights, rounded
to bf16, are written every half minute; `trained.json` beside them says what was reached. PyTorch is all that it needs:

    train.py --seconds 150 --out FOLDER          on a GPU
    train.py --tiny --seconds 240 --out FOLDER   on a CPU: a smaller model that reads short books
"""

import argparse
import json
import math
import os
import pathlib
import random
import struct
import time
import traceback
import typing

START = time.monotonic()

import torch  # noqa: E402  (the clock includes what it takes to load)
import torch.nn.functional as F  # noqa: E402

# The tokens of the program's byte tokenizer: bytes, and the marks after them.
BEGIN, END, USER, ASSISTANT, END_OF_MESSAGE = 256, 257, 259, 260, 261
VOCABULARY = 262

FIRST_NAMES = """Ada Agnes Alan Alma Amos Anna Basil Bela Blaise Carl Clara Cora Cyril Dora Dorothy Edith Edsger Elias
Ellen Emil Emmy Erwin Esther Felix Flora Frances Frank George Grace Greta Hanna Hector Helen Henry Ida Irene Isaac Ivan
Jonas Joan Karen Kurt Laura Leo Lise Louis Lucy Mabel Marie Max Nora Olga Oscar Otto Paul Peter Rosa Ruth Simon Sofia
Tycho Ursula Vera Walter""".split()
LAST_NAMES = """Alder Ash Barley Beck Birch Bloom Briar Brook Cedar Clay Cliff Crane Dale Dove Elm Falk Fern Field Finch
Ford Fox Frost Gale Glen Grove Hale Hart Hawk Hazel Heath Hill Holt Jay Lake Lane Lark Linden Marsh May Mead Moss North
Oaks Park Pike Pond Quill Reed Ridge Rook Rose Rowan Rush Sage Shaw Snow Stone Swan Thorn Vale Wells West Wood
Wren""".split()
CROPS = """apples barley basil beans beets cabbage carrots celery cherries chives clover corn cress cumin dill fennel
figs flax garlic grapes hemp hops kale leeks lentils lettuce maize millet mint mustard oats olives onions parsley peas
pears pepper plums poppies pumpkins quinces radishes rice rye saffron sage sorrel spelt spinach thyme tomatoes turnips
vetch wheat""".split()
SYLLABLES = """ba be bi bo da de di do fa fe fi fo ga ge ka ke ki ko la le li lo ma me mi mo na ne ni no pa pe po ra re
ri ro sa se si so ta te ti to va ve vi vo za zo""".split()
CODAS = ["", "", "n", "r", "l", "s", "m", "k"]
PREFACE = [
    "On the slope above the village the fields lie in terraces, one below the other. ",
    "The highest is small and gets the sun first. ",
    "The one in the middle is wider, and a short walk away. ",
    "The lowest reaches down to the river, and nothing that was brought down is lost in winter. ",
    "Nobody grows again what only has to be fetched. ",
    "\n\n",
    "The book of the fields says:\n",
]

# What is asked, as text before and after what it is asked about, and how often.
KEEPER, CROP, ROW, SUM, SEQUENCE = range(5)
KINDS = ["keeper", "crop", "row", "sum", "sequence"]
SHARES = [0.36, 0.24, 0.20, 0.10, 0.10]
WORDINGS = {
    KEEPER: [("Who keeps row ", "?"), ("By whom is row ", " kept?"), ("Name the keeper of row ", ".")],
    CROP: [("What grows in row ", "?"), ("Which crop is in row ", "?"), ("Name the crop of row ", ".")],
    ROW: [("Which row does ", " keep?"), ("Where does ", " work?"), ("Name the row of ", ".")],
    SUM: [("What is ", "?"), ("Add ", "."), ("How much is ", "?")],
    SEQUENCE: [("What comes after ", "?"), ("Continue ", "."), ("What follows ", "?")],
}
NUMBERS = 1000
MADE_NAMES = 128

# How much a token outside of answers counts in the loss.
TEXT_WEIGHT = 0.05
# Bytes that a row of a book has on average.
ROW_BYTES = 38


class Words:
    """The pieces that texts are put together from, as a table of tokens with a row for each piece."""

    def __init__(self, device, names_seed):
        self.pieces = []
        self.empty = self.add([])
        self.begin = self.add([BEGIN])
        self.user = self.add([USER])
        self.end = self.add([END])
        self.end_of_message = self.add([END_OF_MESSAGE])
        self.end_of_question = self.add([END_OF_MESSAGE, ASSISTANT])
        self.text = {text: self.add(text.encode()) for text in ["Row ", ": ", ", kept by ", " ", ".\n", " + ", ", ", "\n"]}
        self.preface = [self.add(text.encode()) for text in PREFACE]
        self.wordings = {kind: [[self.add(part.encode()) for part in parts] for parts in wordings]
                         for kind, wordings in WORDINGS.items()}
        self.number = len(self.pieces)
        for number in range(NUMBERS):
            self.add(str(number).encode())
        self.crop = len(self.pieces)
        for crop in CROPS:
            self.add(crop.encode())
        random_names = random.Random(names_seed)
        self.first = len(self.pieces)
        for name in FIRST_NAMES + [made_name(random_names) for _ in range(MADE_NAMES)]:
            self.add(name.encode())
        self.last = len(self.pieces)
        for name in LAST_NAMES + [made_name(random_names) for _ in range(MADE_NAMES)]:
            self.add(name.encode())
        lengths = [len(piece) for piece in self.pieces]
        rows = [list(piece) + [0] * (max(lengths) - len(piece)) for piece in self.pieces]
        # All that is on the device is brought there once, because a copy from the host waits for the steps before it.
        self.preface = torch.tensor(self.preface, device=device)
        self.wordings = torch.tensor([self.wordings[kind] for kind in range(len(KINDS))], device=device)
        self.shares = torch.tensor(SHARES, device=device).cumsum(0)
        self.table = torch.tensor(rows, dtype=torch.int64, device=device)
        self.lengths = torch.tensor(lengths, dtype=torch.int64, device=device)

    def add(self, tokens):
        self.pieces.append(tokens)
        return len(self.pieces) - 1


def made_name(source):
    """A name that is in no list."""
    return (source.choice(SYLLABLES) + source.choice(SYLLABLES) + source.choice(CODAS)).capitalize()


class Texts(typing.NamedTuple):
    """A batch of texts, and which of their tokens answer what."""

    # [text][token]
    tokens: torch.Tensor
    # [text][token]: the kind of question that the token answers, or -1
    answer_kind: torch.Tensor
    # [text][token]: the number of that question in its text
    question: torch.Tensor
    # [text][question]: whether all of its answer is there
    complete: torch.Tensor


def make_texts(words, count, length, rows, source, device):
    """Makes up texts of so many tokens, each a book of `rows[0]` to `rows[1]` rows with questions about it."""
    def rand(*size):
        return torch.rand(*size, generator=source, device=device)

    def below(limit, *size):
        return (rand(*size) * limit).long()

    rows_max = max(rows[1], 1)
    rows_here = rows[0] + below(rows[1] - rows[0] + 1, count, 1)
    # Some texts are questions that need no book.
    rows_here = torch.where(rand(count, 1) < 0.03, 0, rows_here) if rows[0] < rows[1] else rows_here
    index = torch.arange(rows_max, device=device).expand(count, -1)
    there = index < rows_here

    # Rows have the numbers from 1 on or any others, in any order or ascending.
    draws = rand(count, NUMBERS - 1)
    beyond = torch.arange(NUMBERS - 1, device=device) >= rows_here
    draws = draws + 2 * (beyond & (rand(count, 1) < 0.5))
    number = draws.topk(rows_max, largest=False, sorted=True).indices + 1
    ascending = torch.where(there, number, NUMBERS).sort(1).values.clamp(max=NUMBERS - 1)
    number = torch.where(rand(count, 1) < 0.3, ascending, number)

    # Nobody keeps two rows of a book.
    listed, made = len(FIRST_NAMES) * len(LAST_NAMES), MADE_NAMES * MADE_NAMES
    from_list = rand(count, listed).topk(rows_max).indices
    from_made = rand(count, made).topk(rows_max).indices
    is_listed = rand(count, rows_max) < rand(count, 1)
    first = torch.where(is_listed, from_list // len(LAST_NAMES), len(FIRST_NAMES) + from_made // MADE_NAMES)
    last = torch.where(is_listed, from_list % len(LAST_NAMES), len(LAST_NAMES) + from_made % MADE_NAMES)
    crop = below(len(CROPS), count, rows_max)
    number, first, last, crop = words.number + number, words.first + first, words.last + last, words.crop + crop

    def fixed(text):
        return torch.full_like(index, words.text[text])

    book = torch.stack([fixed("Row "), number, fixed(": "), crop, fixed(", kept by "), first, fixed(" "), last,
                        fixed(".\n")], 2)
    book = torch.where(there.unsqueeze(2), book, words.empty).flatten(1)

    is_chat = rand(count, 1) < 0.3
    preface = words.preface.expand(count, -1)
    kept = (rand(count, len(PREFACE)) < 0.5) & (rand(count, 1) < 0.4) & (rows_here > 0)
    preface = torch.where(kept & (length > 1000), preface, words.empty)
    opening = torch.cat([torch.full_like(rows_here, words.begin), torch.where(is_chat, words.user, words.empty), preface], 1)
    gap = torch.where((rand(count, 1) < 0.3) & (rows_here > 0), words.text["\n"], words.empty)

    # Questions to the end of the text, and past it.
    asked = max(4, (length - rows[0] * 30) // 22)
    kind = torch.searchsorted(words.shares, rand(count, asked)).clamp(max=SEQUENCE)
    kind = torch.where(rows_here > 0, kind, SUM + kind % 2)
    about = (rand(count, asked) * rows_here).long().clamp(max=rows_max - 1)
    wording = below(3, count, asked)
    wordings = words.wordings[kind, wording]

    empty = torch.full_like(kind, words.empty)
    def picked(of_row):
        return of_row.gather(1, about)

    def text(text):
        return torch.full_like(kind, words.text[text])

    a, b = below(100, count, asked), below(100, count, asked)
    begin, step = below(60, count, asked), 1 + below(12, count, asked)
    terms = [words.number + begin + step * term for term in range(5)]
    content = torch.stack([
        torch.stack([picked(number)] + [empty] * 6, 2),
        torch.stack([picked(number)] + [empty] * 6, 2),
        torch.stack([picked(first), text(" "), picked(last)] + [empty] * 4, 2),
        torch.stack([words.number + a, text(" + "), words.number + b] + [empty] * 4, 2),
        torch.stack([terms[0], text(", "), terms[1], text(", "), terms[2], text(", "), terms[3]], 2),
    ])
    answers = torch.stack([
        torch.stack([picked(first), text(" "), picked(last)], 2),
        torch.stack([picked(crop), empty, empty], 2),
        torch.stack([picked(number), empty, empty], 2),
        torch.stack([words.number + a + b, empty, empty], 2),
        torch.stack([terms[4], empty, empty], 2),
    ])
    def of_kind(choices):
        return choices.gather(0, kind[None, :, :, None].expand(1, -1, -1, choices.shape[3]))[0]

    is_first = torch.arange(asked, device=device) == 0
    before = torch.where(is_chat & ~is_first, words.user, words.empty)
    question_end = torch.where(is_chat, words.end_of_question, words.text["\n"]).expand(-1, asked)
    answer_end = torch.where(is_chat, words.end_of_message, words.end).expand(-1, asked)
    questions = torch.cat([before.unsqueeze(2), wordings[:, :, :1], of_kind(content), wordings[:, :, 1:],
                           question_end.unsqueeze(2), of_kind(answers), answer_end.unsqueeze(2)], 2)
    per_question = questions.shape[2]
    ids = torch.cat([opening, book, gap, questions.flatten(1)], 1)

    # Which piece each token belongs to.
    ends = words.lengths[ids].cumsum(1)
    position = torch.arange(length, device=device).expand(count, -1).contiguous()
    slot = torch.searchsorted(ends, position, right=True).clamp(max=ids.shape[1] - 1)
    offset = position - (ends - words.lengths[ids]).gather(1, slot)
    is_text = position < ends[:, -1:]
    tokens = words.table[ids.gather(1, slot), offset.clamp(0, words.table.shape[1] - 1)]
    tokens = torch.where(is_text, tokens, END)
    first_slot = ids.shape[1] - asked * per_question
    place = slot - first_slot
    question = (place.clamp(min=0) // per_question)
    is_answer = is_text & (place >= 0) & (place % per_question >= per_question - 4)
    answer_kind = torch.where(is_answer, kind.gather(1, question), -1)
    complete = ends[:, first_slot:].view(count, asked, per_question)[:, :, -1] <= length
    return Texts(tokens, answer_kind, question, complete)


class Block(torch.nn.Module):
    def __init__(self, shape):
        super().__init__()
        self.shape = shape
        dim, queries, keys = shape["dim"], shape["heads"] * shape["head_dim"], shape["kv_heads"] * shape["head_dim"]
        linear = lambda inputs, outputs: torch.nn.Linear(inputs, outputs, bias=False)
        self.attention_norm = torch.nn.Parameter(torch.ones(dim))
        self.qkv = linear(dim, queries + 2 * keys)
        self.attention_out = linear(queries, dim)
        self.feed_forward_norm = torch.nn.Parameter(torch.ones(dim))
        self.gate_up = linear(dim, 2 * shape["hidden"])
        self.down = linear(shape["hidden"], dim)
        deep = math.sqrt(2 * shape["layers"])
        for layer, scale in [(self.qkv, 1), (self.attention_out, 1 / deep), (self.gate_up, 1), (self.down, 1 / deep)]:
            torch.nn.init.normal_(layer.weight, std=scale / math.sqrt(layer.in_features))

    def forward(self, x, cosines, sines):
        shape = self.shape
        batch, length, dim = x.shape
        heads, kv_heads, head_dim = shape["heads"], shape["kv_heads"], shape["head_dim"]
        qkv = self.qkv(F.rms_norm(x, (dim,), self.attention_norm, 1e-5))
        qkv = qkv.view(batch, length, heads + 2 * kv_heads, head_dim).transpose(1, 2)
        turned, values = qkv[:, :heads + kv_heads], qkv[:, heads + kv_heads:]
        # A pair is an element of the head's first half and one of its second.
        one, other = turned.float().chunk(2, -1)
        turned = torch.cat([one * cosines - other * sines, other * cosines + one * sines], -1).to(values.dtype)
        queries, keys = turned[:, :heads], turned[:, heads:]
        group = heads // kv_heads
        keys, values = keys.repeat_interleave(group, 1), values.repeat_interleave(group, 1)
        found = F.scaled_dot_product_attention(queries, keys, values, is_causal=True)
        x = x + self.attention_out(found.transpose(1, 2).reshape(batch, length, heads * head_dim))
        gate, up = self.gate_up(F.rms_norm(x, (dim,), self.feed_forward_norm, 1e-5)).chunk(2, -1)
        return x + self.down(F.silu(gate) * up)


class Llama(torch.nn.Module):
    def __init__(self, shape):
        super().__init__()
        self.shape = shape
        self.embeddings = torch.nn.Parameter(torch.randn(VOCABULARY, shape["dim"]) / math.sqrt(shape["dim"]))
        self.blocks = torch.nn.ModuleList(Block(shape) for _ in range(shape["layers"]))
        self.final_norm = torch.nn.Parameter(torch.ones(shape["dim"]))

    def forward(self, tokens):
        half = self.shape["head_dim"] // 2
        frequencies = self.shape["rope_theta"] ** (-torch.arange(half, device=tokens.device, dtype=torch.float64) / half)
        angles = torch.arange(tokens.shape[1], device=tokens.device)[:, None] * frequencies
        cosines, sines = angles.cos().float(), angles.sin().float()
        x = F.embedding(tokens, self.embeddings)
        for block in self.blocks:
            x = block(x, cosines, sines)
        with torch.autocast(tokens.device.type, enabled=False):
            return F.linear(F.rms_norm(x.float(), x.shape[-1:], self.final_norm, 1e-5), self.embeddings)

    def tensors(self):
        """The weights under the names that Hugging Face gives them."""
        shape = self.shape
        queries, keys = shape["heads"] * shape["head_dim"], shape["kv_heads"] * shape["head_dim"]
        found = {"model.embed_tokens.weight": self.embeddings, "model.norm.weight": self.final_norm}
        for number, block in enumerate(self.blocks):
            of_layer = dict(zip(["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"],
                                block.qkv.weight.split([queries, keys, keys])))
            of_layer |= dict(zip(["mlp.gate_proj", "mlp.up_proj"], block.gate_up.weight.chunk(2)))
            of_layer |= {"self_attn.o_proj": block.attention_out.weight, "mlp.down_proj": block.down.weight,
                         "input_layernorm": block.attention_norm, "post_attention_layernorm": block.feed_forward_norm}
            found |= {f"model.layers.{number}.{name}.weight": tensor for name, tensor in of_layer.items()}
        return {name: found[name].detach() for name in sorted(found)}


def write_safetensors(path, tensors):
    """A length, a header in JSON, and the numbers in bf16."""
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


def outcome_of(logits, texts):
    """The loss of each token but the first, whether it was guessed, and what it counts."""
    targets, kind = texts.tokens[:, 1:], texts.answer_kind[:, 1:]
    losses = F.cross_entropy(logits[:, :-1].flatten(0, 1), targets.flatten(), reduction="none").view_as(targets)
    right = logits[:, :-1].argmax(-1) == targets
    return losses, right, kind


def rows_for(length, room):
    """How many rows fill a text but for some room."""
    return max(1, (length - room) // ROW_BYTES)


@torch.no_grad()
def evaluate(model, lengths, texts_per_length, seed, device):
    """The share of answers that greedy decoding gives to the byte, after books that fill all of a text but its end.

    The books come from a seed of their own and their made-up names from another, so none of them was trained on."""
    rounded = Llama(model.shape).to(device)
    rounded.load_state_dict({name: value.bfloat16().float() for name, value in model.state_dict().items()})
    torch.set_float32_matmul_precision("highest")
    words = Words(torch.device("cpu"), names_seed=seed)
    source = torch.Generator().manual_seed(seed)
    report = {}
    for length in lengths:
        right = [0] * len(KINDS)
        asked = [0] * len(KINDS)
        full = rows_for(length, min(400, length // 2))
        for _ in range(0, texts_per_length, 8):
            texts = make_texts(words, 8, length, (full, full), source, torch.device("cpu"))
            texts = Texts(*(value.to(device) for value in texts))
            _, hit, kind = outcome_of(rounded(texts.tokens), texts)
            whole = torch.ones_like(texts.complete, dtype=torch.long)
            whole.scatter_reduce_(1, texts.question[:, 1:], (hit | (kind < 0)).long(), "amin")
            kinds = torch.full_like(whole, -1).scatter_reduce_(1, texts.question[:, 1:], kind, "amax")
            for number in range(len(KINDS)):
                of_kind = texts.complete & (kinds == number)
                asked[number] += int(of_kind.sum())
                right[number] += int((whole.bool() & of_kind).sum())
        report[str(length)] = {name: {"asked": asked[i], "right": right[i]} for i, name in enumerate(KINDS)}
    return report


def learning_rate(done, peak):
    """Warms up, stays, and falls in a line; `done` goes from 0 to 1."""
    return peak * min(1.0, done / 0.02, max(0.02, (1.0 - done) / 0.45))


def train(options, out):
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    on_gpu = device.type == "cuda"
    torch.manual_seed(options.seed)
    torch.set_float32_matmul_precision("high")
    shape = {"dim": 256, "layers": 6, "heads": 6, "kv_heads": 3, "head_dim": 64, "hidden": 448, "rope_theta": 500000.0}
    lengths, tokens_per_step = [256, 512, 1024, 2048, 4096], 32768
    latest = [0.45, 0.55, 0.65, 0.78]
    if options.tiny:
        shape |= {"dim": 128, "layers": 4, "heads": 4, "kv_heads": 2, "head_dim": 32, "hidden": 256}
        lengths, tokens_per_step, latest = [160, 320], 1600, [0.75]
    model = Llama(shape).to(device)
    matrices = [value for value in model.parameters() if value.dim() == 2]
    vectors = [value for value in model.parameters() if value.dim() == 1]
    optimizer = torch.optim.AdamW([{"params": matrices, "weight_decay": 0.05}, {"params": vectors, "weight_decay": 0.0}],
                                  lr=options.rate, betas=(0.9, 0.98), fused=on_gpu)
    source = torch.Generator(device=device).manual_seed(options.seed)
    report = {"seed": options.seed, "seconds": options.seconds, "shape": shape, "peak_rate": options.rate,
              "device": torch.cuda.get_device_name(0) if on_gpu else "CPU", "torch": torch.__version__,
              "parameters": sum(value.numel() for value in model.parameters()), "history": []}
    begin = time.monotonic() - START
    end = options.seconds - options.reserve
    report["seconds_until_first_step"] = round(begin, 1)
    stage, step, tokens_seen, accuracy, saved = 0, 0, 0, 0.0, begin
    tally = torch.zeros(2 + 2 * len(KINDS), device=device)
    tallied = 0

    def save():
        write_safetensors(out / "model.safetensors", model.tensors())
        (out / "trained.json").write_text(json.dumps(report, indent=1) + "\n")

    while True:
        elapsed = time.monotonic() - START
        done = (elapsed - begin) / max(end - begin, 1e-9)
        if done >= 1.0:
            break
        if step % 100 == 0:
            words = Words(device, names_seed=options.seed * 1_000_003 + step)
        # Short books are met again, so that they are not forgotten.
        length = lengths[stage] if stage == 0 or step % 4 else lengths[step // 4 % stage]
        texts = make_texts(words, max(1, tokens_per_step // length), length, (1, rows_for(length, min(120, length // 2))), source, device)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(done, options.rate)
        with torch.autocast(device.type, torch.bfloat16, enabled=on_gpu):
            logits = model(texts.tokens)
        losses, right, kind = outcome_of(logits, texts)
        is_answer = kind >= 0
        weights = torch.where(is_answer, 1.0, TEXT_WEIGHT)
        loss = (losses * weights).sum() / weights.sum()
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        step, tokens_seen, tallied = step + 1, tokens_seen + texts.tokens.numel(), tallied + 1
        with torch.no_grad():
            answer_loss = (losses * is_answer).sum() / is_answer.sum().clamp(min=1)
            counts = [value for number in range(len(KINDS)) for value in ((kind == number).sum(), (right & (kind == number)).sum())]
            tally += torch.stack([loss.detach(), answer_loss] + [count.float() for count in counts])
        if tallied == options.every:
            found = tally.tolist()
            by_kind = {name: round(found[3 + 2 * i] / max(found[2 + 2 * i], 1), 4) for i, name in enumerate(KINDS)}
            accuracy = sum(by_kind[name] for name in KINDS[:3]) / 3
            line = {"seconds": round(elapsed, 1), "step": step, "tokens": tokens_seen, "length": lengths[stage],
                    "loss": round(found[0] / tallied, 4), "answer_loss": round(found[1] / tallied, 4), "tokens_right": by_kind}
            report["history"].append(line)
            print(json.dumps(line), flush=True)
            tally.zero_()
            tallied = 0
            if stage + 1 < len(lengths) and (accuracy > 0.97 or done > latest[stage]):
                stage += 1
        if elapsed - saved > 30:
            saved = elapsed
            save()
    report |= {"steps": step, "tokens": tokens_seen, "seconds_of_training": round(time.monotonic() - START - begin, 1)}
    save()
    try:
        report["held_out"] = evaluate(model, lengths, options.texts, options.seed + 1, device)
        print(json.dumps(report["held_out"]), flush=True)
    except Exception:  # what was trained is worth more than what can be said about it
        traceback.print_exc()
    report["seconds_in_all"] = round(time.monotonic() - START, 1)
    save()


def arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=150, help="how long all of it may take, 150 unless told")
    parser.add_argument("--reserve", type=float, default=12, help="how much of that is kept for the evaluation")
    parser.add_argument("--seed", type=int, default=17)
    parser.add_argument("--rate", type=float, default=2e-3, help="the highest learning rate")
    parser.add_argument("--every", type=int, default=100, help="steps between two lines of the history")
    parser.add_argument("--texts", type=int, default=200, help="books of each length that the evaluation asks about")
    parser.add_argument("--tiny", action="store_true", help="a smaller model that reads short books")
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path(os.environ.get("OUT", ".")))
    return parser.parse_args()


if __name__ == "__main__":
    options = arguments()
    options.out.mkdir(parents=True, exist_ok=True)
    train(options, options.out)
