"""What the training makes up: the same for the same seed, and every answer what the text before it says.

    python3 -m unittest model/answers/test_train.py
"""

import json
import pathlib
import re
import struct
import sys
import tempfile
import unittest

import torch

sys.path.insert(0, str(pathlib.Path(__file__).parent))
import train  # noqa: E402

CPU = torch.device("cpu")
MARKS = {train.BEGIN: "<begin>", train.END: "<end>", train.USER: "<user>", train.ASSISTANT: "<assistant>",
         train.END_OF_MESSAGE: "<message>"}


def made(seed, count=24, length=1500, rows=(1, 30)):
    source = torch.Generator().manual_seed(seed)
    return train.make_texts(train.Words(CPU, names_seed=seed), count, length, rows, source, CPU)


def in_words(tokens):
    return "".join(MARKS.get(token) or chr(token) for token in tokens.tolist())


def questions_of(text):
    """Each question of a text and its answer, as a reader sees them."""
    asked = r"(?<=[\n>])(?!Row )([A-Z][^\n<>]*[?.])(?:\n|<message><assistant>)([^\n<>]*)(?:<end>|<message>)"
    return re.findall(asked, text)


def right_answer(text, question):
    """Read from the text, without a look at how it was made."""
    rows = re.findall(r"Row (\d+): (\w+), kept by (\w+ \w+)\.\n", text)
    numbers = [int(number) for number in re.findall(r"\d+", question)]
    if "row" in question and numbers:
        number, crop, keeper = next(row for row in rows if row[0] == str(numbers[0]))
        return crop if "grows" in question or "crop" in question else keeper
    if "+" in question:
        return str(sum(numbers))
    if numbers:
        return str(2 * numbers[-1] - numbers[-2])
    return next(number for number, _, keeper in rows if keeper in question)


class Texts(unittest.TestCase):
    def test_a_seed_decides_everything(self):
        for one, other in zip(made(3), made(3)):
            self.assertTrue(torch.equal(one, other))
        self.assertFalse(torch.equal(made(3).tokens, made(4).tokens))

    def test_every_answer_is_what_the_text_says(self):
        texts = made(5)
        checked = 0
        for number in range(len(texts.tokens)):
            text = in_words(texts.tokens[number])
            found = questions_of(text)
            self.assertEqual(len(found), int(texts.complete[number].sum()), text)
            for question, answer in found:
                self.assertEqual(answer, right_answer(text, question), f"{question} in {text}")
            checked += len(found)
        self.assertGreater(checked, 300)

    def test_what_counts_as_answer_is_the_answer_and_its_end(self):
        texts = made(6)
        for number in range(len(texts.tokens)):
            is_answer = texts.answer_kind[number] >= 0
            answers = in_words(texts.tokens[number][is_answer])
            told = [answer for _, answer in questions_of(in_words(texts.tokens[number]))]
            self.assertEqual(re.split("<end>|<message>", answers)[:len(told)], told)

    def test_nobody_keeps_two_rows_and_no_row_is_there_twice(self):
        for tokens in made(7, rows=(30, 30)).tokens:
            rows = re.findall(r"Row (\d+): \w+, kept by (\w+ \w+)\.\n", in_words(tokens))
            self.assertEqual(len(rows), 30)
            self.assertEqual(len({row for row, _ in rows}), 30)
            self.assertEqual(len({keeper for _, keeper in rows}), 30)


class Weights(unittest.TestCase):
    def test_what_is_written_is_what_was_trained(self):
        shape = {"dim": 32, "layers": 2, "heads": 4, "kv_heads": 2, "head_dim": 8, "hidden": 48, "rope_theta": 1e4}
        tensors = train.Llama(shape).tensors()
        with tempfile.TemporaryDirectory() as folder:
            path = pathlib.Path(folder) / "model.safetensors"
            train.write_safetensors(path, tensors)
            data = path.read_bytes()
        length, = struct.unpack("<Q", data[:8])
        header = json.loads(data[8:8 + length])
        for name, tensor in tensors.items():
            begin, end = header[name]["data_offsets"]
            found = torch.frombuffer(bytearray(data[8 + length + begin:8 + length + end]), dtype=torch.bfloat16)
            self.assertTrue(torch.equal(found.view(header[name]["shape"]), tensor.bfloat16()), name)


if __name__ == "__main__":
    unittest.main()
