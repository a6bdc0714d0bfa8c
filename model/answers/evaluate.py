#!/usr/bin/env python3
"""Measures the built-in model on books whose names and crops come from lists that training never saw.

For each length it asks about books that fill the whole text: who keeps a row, what grows there, which row a person keeps,
and questions that the book does not answer. An answer is right if greedy decoding gives it to the byte. Weights are
those of the program, rounded to bf16; the arithmetic is f32, as in the program.

    evaluate.py FOLDER                              500 books of each length; writes evaluated.json and model.json there
    evaluate.py FOLDER --books 20 --lengths 512     a part of it, on a CPU; writes nothing
    evaluate.py FOLDER --sample                     only writes sample.json, as the first command does too

`sample.json` has some of the questions and answers. A test of the program compares its own answers with them.
`model.json` tells the program the longest length up to which the goals are reached. The program advertises that length.
"""

import argparse
import functools
import json
import multiprocessing
import pathlib
import random

import torch

import books
from llama import SHAPE, Llama
from train import whole_answers

LENGTHS = [256, 512, 1024, 2048, 3072, 4096, 6144, 8192]
# Bytes that the longest question and its answer take.
QUESTION_ROOM = 84
SAMPLE_LENGTH, SAMPLE_BOOKS = 640, 12
# Questions without an answer in the book, of any kind.
ABSENT = "absent"
# Shares of right answers that are needed up to the advertised length.
GOALS = {"keeper": 0.98, "crop": 0.98, "row": 0.9, ABSENT: 0.9}
# Questions, as shares of the number of books.
ASKED = {"keeper": 1.0, "crop": 0.4, "row": 0.4, ABSENT: 0.4}


class TestNames(books.Names):
    """Names and crops from the test lists. First and last words of a list are combined anew."""

    def __init__(self, source, wanted):
        super().__init__(source)
        self.lists = [entries for name, entries in books.test_lists().items() if name in wanted]
        self.crops = books.test_lists()["crops"]

    def keeper(self, style):
        names = self.source.choice(self.lists)
        one, other = self.source.choice(names), self.source.choice(names)
        combined = f"{one.split(' ')[0]} {other.split(' ')[-1]}"
        is_kept = self.source.random() < 0.3 or len(combined.encode()) > books.NAME_BYTES[1]
        return one if is_kept else combined

    def crop(self, style):
        return self.source.choice(self.crops)

    def altered(self, text):
        return self._edit(text)


def test_text(seed, length, asked):
    """A text with one question, whose book fills it, and the list that its names come from."""
    source = random.Random(seed)
    lists = [name for name in books.test_lists() if name != "crops"]
    # Names of one list, or of all of them.
    wanted = source.choice(lists + ["mixed"])
    names = TestNames(source, lists if wanted == "mixed" else [wanted])
    text = books.Text(length)
    is_chat = source.random() < 0.3
    books.opening(text, source, books.USER if is_chat else None, length > 1000)
    book = books.Book.made_up(names, source, text.room() - QUESTION_ROOM)
    text.add(book.text())
    is_absent = asked == ABSENT
    kind = source.choice([books.KEEPER, books.CROP, books.ROW]) if is_absent else books.KINDS.index(asked)
    question = book.question(source.randrange(len(book.rows)), 1.0 if is_absent else 0.0, kind)
    assert books.ask(text, question, is_chat, is_chat), "the book leaves room for a question"
    return text, wanted


def texts_of(length, count, apply=map):
    """All texts of a length, as what is asked, the list of names, and the text. `apply` is `map` or like it."""
    wanted = [(asked, number) for asked, part in ASKED.items() for number in range(max(1, round(part * count)))]
    return list(apply(functools.partial(numbered_text, length), wanted))


def numbered_text(length, wanted):
    asked, number = wanted
    text, names = test_text(f"{length} {asked} {number}", length, asked)
    return asked, names, text


def measure(model, texts, device):
    """Questions and right answers of one length: by kind, and about keepers by list of names."""
    found = {}

    def add(group, name, is_right):
        entry = found.setdefault(group, {}).setdefault(name, {"asked": 0, "right": 0})
        entry["asked"] += 1
        entry["right"] += is_right

    for (asked, wanted, _), is_right in judged(model, texts, device):
        add("kinds", asked, is_right)
        if asked == "keeper":
            add("keepers_by_list", wanted, is_right)
    return found


@torch.no_grad()
def judged(model, texts, device):
    """Each of some texts of one length, and whether the model gives its answer."""
    per_batch = max(1, (65_536 if device.type == "cuda" else 8_192) // texts[0][2].length)
    for begin in range(0, len(texts), per_batch):
        part = texts[begin:begin + per_batch]
        arrays = zip(*(text.padded() for _, _, text in part))
        tokens, kinds, numbers = (torch.stack([torch.from_numpy(row) for row in rows]).long().to(device) for rows in arrays)
        guessed = model.logits(model.hidden(tokens, torch.float32)[:, :-1]).argmax(-1)
        kinds, numbers = kinds[:, 1:], numbers[:, 1:]
        whole, _ = whole_answers((guessed == tokens[:, 1:]) | (kinds < 0), kinds, numbers)
        yield from zip(part, whole[:, 0].tolist())


def sample(model, device):
    """Prompts outside of chats, their right answers, and whether the model gives those."""
    texts = [entry for entry in texts_of(SAMPLE_LENGTH, SAMPLE_BOOKS) if books.USER not in entry[2].tokens]
    found = []
    for (asked, _, text), is_right in judged(model, texts, device):
        question, = text.questions
        prompt = bytes(text.tokens[1:text.numbers.index(0)]).decode()
        found.append({"asked": asked, "prompt": prompt, "answer": question.answer, "right": is_right})
    return found


def reaches_goals(found):
    """Whether answers of each kind are right often enough."""
    return all(found["kinds"][asked]["right"] >= goal * found["kinds"][asked]["asked"] for asked, goal in GOALS.items())


def arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=pathlib.Path, help="has model.safetensors and model.json")
    parser.add_argument("--books", type=int, default=500, help="books of each length that are asked about a keeper")
    parser.add_argument("--lengths", type=int, nargs="+", default=LENGTHS, help="tokens of a text")
    parser.add_argument("--sample", action="store_true", help="only write sample.json")
    return parser.parse_args()


def table(report):
    """The figures as rows of a table in Markdown."""
    lines = ["| tokens | " + " | ".join(ASKED) + " |", "|---" * (1 + len(ASKED)) + "|"]
    for length, found in report["lengths"].items():
        entries = (found["kinds"][asked] for asked in ASKED)
        lines.append(f"| {int(length):,} | " + " | ".join(f"{e['right']} of {e['asked']}" for e in entries) + " |")
    return "\n".join(lines)


def write_json(path, value):
    path.write_text(json.dumps(value, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def main():
    options = arguments()
    # Before CUDA begins, because of the processes that are forked.
    with multiprocessing.Pool() as pool:
        apply = functools.partial(pool.map, chunksize=16)
        texts = {} if options.sample else {length: texts_of(length, options.books, apply) for length in options.lengths}
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.set_float32_matmul_precision("highest")
    described = json.loads((options.folder / "model.json").read_text())
    model = Llama(SHAPE | described["shape"]).to(device)
    model.read(options.folder / "model.safetensors")
    if options.sample:
        write_json(options.folder / "sample.json", sample(model, device))
        return
    report = {"goals": GOALS, "lengths": {}}
    lengths = sorted(options.lengths)
    for length in lengths:
        found = measure(model, texts[length], device)
        report["lengths"][str(length)] = found
        print(length, json.dumps(found), flush=True)
    reached = [reaches_goals(report["lengths"][str(length)]) for length in lengths]
    good = lengths[:reached.index(False)] if False in reached else lengths
    report["limit_tokens"] = good[-1] if good else None
    print(table(report))
    print(f"The goals are reached up to {report['limit_tokens']} tokens.")
    if options.books == 500 and options.lengths == LENGTHS:
        if good:
            keepers = [report["lengths"][str(length)]["kinds"]["keeper"] for length in good]
            worst = min(keepers, key=lambda entry: entry["right"])
            described |= {"context_tokens": good[-1], "measured": worst}
            write_json(options.folder / "model.json", described)
        write_json(options.folder / "evaluated.json", report)
        write_json(options.folder / "sample.json", sample(model, device))


if __name__ == "__main__":
    main()
