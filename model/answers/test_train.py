"""Tests of the built-in model's training: its texts, its test lists, and the files that it writes.

    python3 -m unittest model/answers/test_train.py
"""

import json
import pathlib
import random
import re
import struct
import sys
import tempfile
import unittest

import numpy
import torch

sys.path.insert(0, str(pathlib.Path(__file__).parent))
import books  # noqa: E402
import evaluate  # noqa: E402
import llama  # noqa: E402
import train  # noqa: E402

MARKS = {books.BEGIN: "<begin>", books.END: "<end>", books.SYSTEM: "<system>", books.USER: "<user>",
         books.ASSISTANT: "<assistant>", books.END_OF_MESSAGE: "<message>"}
ROW = re.compile(r"Row (\d+): (.+), kept by (.+)\.\n")


def texts(seed, count=20, length=1500):
    source = random.Random(seed)
    names = books.Names(source)
    return [books.training_text(names, source, length) for _ in range(count)]


def in_words(tokens):
    """Text with its marks in words."""
    parts, found = [], bytearray()
    for token in tokens:
        if token < 256:
            found.append(token)
        else:
            parts += [found.decode(), MARKS[token]]
            found = bytearray()
    return "".join(parts) + found.decode()


def about(question):
    """What a question asks about, found without the wording that was chosen."""
    for wording in books.WORDINGS[question.kind]:
        before, after = wording.split("{}")
        if question.text.startswith(before) and question.text.endswith(after):
            return question.text[len(before):len(question.text) - len(after)]
    raise AssertionError(question)


def right_answer(book, question):
    """The answer, read from the text of a book without regard to how it was made."""
    rows = ROW.findall(book)
    asked = about(question)
    numbers = [int(number) for number in re.findall(r"\d+", asked)]
    if question.kind == books.SUM:
        return str(sum(numbers))
    if question.kind == books.SEQUENCE:
        return str(2 * numbers[-1] - numbers[-2])
    if question.kind == books.ROW:
        found = [number for number, _, keeper in rows if keeper == asked]
    else:
        found = [keeper if question.kind == books.KEEPER else crop for number, crop, keeper in rows if number == asked]
    assert len(found) <= 1, question
    return found[0] if found else books.NOT_IN_BOOK


class Texts(unittest.TestCase):
    def test_a_seed_decides_everything(self):
        for one, other in zip(books.batch(3, 600, 4), books.batch(3, 600, 4)):
            self.assertTrue(numpy.array_equal(one, other))
        self.assertFalse(numpy.array_equal(books.batch(3, 600, 4)[0], books.batch(4, 600, 4)[0]))

    def test_every_answer_is_what_the_text_says(self):
        checked, absent = 0, 0
        for length in (256, 1500, 4096):
            for text in texts(5, length=length):
                words = in_words(text.tokens)
                for question in text.questions:
                    self.assertEqual(question.answer, right_answer(words, question), words)
                    self.assertEqual(question.answerable, question.answer != books.NOT_IN_BOOK)
                    absent += not question.answerable
                checked += len(text.questions)
        self.assertGreater(checked, 1000)
        self.assertTrue(0.05 < absent / checked < 0.25, absent / checked)

    def test_the_marked_tokens_are_the_answers_and_their_ends(self):
        for text in texts(6):
            tokens, kinds, numbers = text.padded()
            self.assertEqual(len(tokens), 1500)
            for number, question in enumerate(text.questions):
                marked = in_words(tokens[numbers == number])
                self.assertIn(marked, [f"{question.answer}<end>", f"{question.answer}<message>"])
                self.assertTrue((kinds[numbers == number] == question.kind).all())
            self.assertTrue(((kinds < 0) == (numbers < 0)).all())

    def test_numbers_of_a_book_differ(self):
        for text in texts(7, length=4096):
            numbers = [number for number, _, _ in ROW.findall(in_words(text.tokens))]
            self.assertEqual(len(set(numbers)), len(numbers))

    def test_books_fill_any_share_of_a_text(self):
        shares = [sum(map(len, re.findall(r"Row .*\n", in_words(text.tokens)))) / 2000 for text in texts(8, 60, 2000)]
        for least, most in [(0, 0.3), (0.3, 0.6), (0.6, 1)]:
            self.assertTrue(any(least <= share < most for share in shares), shares)

    def test_names_are_of_many_kinds(self):
        names = books.Names(random.Random(9))
        made = [names.keeper(style) for style in books.Names.STYLES for _ in range(300)]
        self.assertTrue(all(2 <= len(name.encode()) <= 32 for name in made))
        for pattern in [r"[0-9]", r"[!-/:-@]", r"[\u0400-\u04ff]", r"[\u4e00-\u9fff]", r"[\u0600-\u06ff]", r"^\S+$",
                        r"^\S+ \S+ \S+ \S+$"]:
            self.assertTrue(any(re.search(pattern, name) for name in made), pattern)


class TestLists(unittest.TestCase):
    def test_there_are_hundreds_of_names_and_a_hundred_crops(self):
        lists = books.test_lists()
        self.assertGreater(sum(len(entries) for name, entries in lists.items() if name != "crops"), 400)
        self.assertGreater(len(lists["crops"]), 100)
        for entries in lists.values():
            self.assertEqual(len(set(entries)), len(entries))

    def test_training_sees_no_word_of_them(self):
        test_words = books.words_of(entry for entries in books.test_lists().values() for entry in entries)
        listed = books.words_of(books.FIRST_NAMES + books.LAST_NAMES + books.CROPS)
        self.assertEqual(test_words & listed, set())
        for text in texts(10, length=4096):
            for number, crop, keeper in ROW.findall(in_words(text.tokens)):
                self.assertEqual(books.words_of([crop, keeper]) & test_words, set())

    def test_evaluation_asks_about_names_of_the_lists_alone(self):
        test_words = books.words_of(entry for entries in books.test_lists().values() for entry in entries)
        for asked, wanted, text in evaluate.texts_of(512, 20):
            question, = text.questions
            words = in_words(text.tokens)
            self.assertEqual(question.answer, right_answer(words, question))
            self.assertEqual(question.answer == books.NOT_IN_BOOK, asked == evaluate.ABSENT)
            self.assertGreater(len(text.tokens), 300)
            if asked == "keeper":
                unknown = books.words_of([question.answer]) - test_words
                # A distractor may be a name of the lists with one letter changed.
                self.assertLess(len(unknown), 3, question)


    def test_every_kind_has_to_reach_its_goal(self):
        kinds = {asked: {"asked": 100, "right": 98} for asked in evaluate.ASKED}
        self.assertTrue(evaluate.reaches_goals({"kinds": kinds}))
        for asked, right in [("keeper", 97), (evaluate.ABSENT, 89)]:
            self.assertFalse(evaluate.reaches_goals({"kinds": kinds | {asked: {"asked": 100, "right": right}}}))


class Model(unittest.TestCase):
    SHAPE = {"dim": 32, "layers": 2, "heads": 4, "kv_heads": 2, "head_dim": 8, "hidden": 48, "rope_theta": 1e4}

    def test_weights_are_read_as_they_were_written(self):
        model = llama.Llama(self.SHAPE)
        with tempfile.TemporaryDirectory() as folder:
            path = pathlib.Path(folder) / "model.safetensors"
            llama.write_safetensors(path, model.tensors())
            data = path.read_bytes()
            other = llama.Llama(self.SHAPE)
            other.read(path)
        length, = struct.unpack("<Q", data[:8])
        header = json.loads(data[8:8 + length])
        for name, tensor in model.tensors().items():
            begin, end = header[name]["data_offsets"]
            found = torch.frombuffer(bytearray(data[8 + length + begin:8 + length + end]), dtype=torch.bfloat16)
            self.assertTrue(torch.equal(found.view(header[name]["shape"]), tensor.bfloat16()), name)
            self.assertTrue(torch.equal(other.tensors()[name], tensor.bfloat16().float()), name)

    def test_later_tokens_change_nothing(self):
        model = llama.Llama(self.SHAPE)
        tokens = torch.randint(0, books.VOCABULARY, (2, 40))
        whole = model.hidden(tokens, torch.float32)
        part = model.hidden(tokens[:, :25], torch.float32)
        self.assertLess(float((whole[:, :25] - part).detach().abs().max()), 1e-4)

    def test_updates_are_nearly_orthogonal(self):
        for size in [(3, 20, 50), (3, 50, 20)]:
            values = torch.linalg.svdvals(train.orthogonal(torch.randn(size)))
            self.assertGreater(float(values.min()), 0.3)
            self.assertLess(float(values.max()), 1.4)

    def test_an_answer_counts_if_all_of_its_tokens_are_right(self):
        numbers = torch.tensor([[-1, 0, 0, -1, 1, 1, -1]])
        kinds = torch.tensor([[-1, 2, 2, -1, 0, 0, -1]])
        hits = torch.tensor([[True, True, True, True, True, False, True]])
        whole, kind = train.whole_answers(hits, kinds, numbers)
        self.assertEqual((whole.tolist(), kind.tolist()), ([[True, False]], [[2, 0]]))
        self.assertEqual(train.shares_right(hits, kinds, numbers), {"keeper": 0.0, "row": 1.0})

    def test_the_described_shape_is_that_of_the_weights(self):
        folder = pathlib.Path(__file__).parent
        described = json.loads((folder / "model.json").read_text())
        model = llama.Llama(described["shape"])
        model.read(folder / "model.safetensors")
        self.assertLessEqual((folder / "model.safetensors").stat().st_size, 8_000_000)
        self.assertEqual(described["context_tokens"] % 256, 0)


if __name__ == "__main__":
    unittest.main()
