"""Training texts of the built-in model: record books and questions about their rows.

    Row 17: barley, kept by Ada Finch.
    ...
    Who keeps row 17?
    Ada Finch

Most names and crops are random strings, so that the model has to copy them from the book and cannot complete them from
memory. Texts are tokens of the program's byte tokenizer. This file needs NumPy and nothing else.
"""

import functools
import pathlib
import random
import string
import typing

import numpy

# Bytes are tokens 0 to 255; the marks between messages follow.
BEGIN, END, SYSTEM, USER, ASSISTANT, END_OF_MESSAGE = 256, 257, 258, 259, 260, 261
VOCABULARY = 262

TEST_LISTS = pathlib.Path(__file__).parent / "test_names"

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
SYLLABLES = [a + b for a in "b d f g h j k l m n p r s t v w z br ch dr fl gr kl pr sch sh st th tr".split()
             for b in "a e i o u ai ee ie ou y".split()]
CODAS = ["", "", "", "n", "r", "l", "s", "m", "k", "t", "ck", "ng", "rt", "sson", "ski", "ez", "ini"]
# Letters of several scripts, as ranges of code points.
SCRIPTS = [
    [(0xC0, 0xD6), (0xD8, 0xF6), (0xF8, 0xFF), (0x61, 0x7A), (0x61, 0x7A)],
    [(0x100, 0x17F), (0x61, 0x7A), (0x61, 0x7A)],
    [(0x1EA0, 0x1EF9), (0x61, 0x7A), (0x61, 0x7A)],
    [(0x391, 0x3A1), (0x3A3, 0x3A9), (0x3B1, 0x3CE)],
    [(0x410, 0x44F)],
    [(0x531, 0x556), (0x561, 0x586)],
    [(0x5D0, 0x5EA)],
    [(0x621, 0x63A), (0x641, 0x64A)],
    [(0x905, 0x939), (0x93E, 0x94D)],
    [(0x985, 0x9B9)],
    [(0xB85, 0xBB9)],
    [(0xE01, 0xE30)],
    [(0x10D0, 0x10F0)],
    [(0x1200, 0x1248)],
    [(0x3041, 0x3093)],
    [(0x30A1, 0x30F3)],
    [(0x4E00, 0x9FA5)],
    [(0xAC00, 0xD7A3)],
]
PREFACE = [
    "On the slope above the village the fields lie in terraces, one below the other. ",
    "The highest is small and gets the sun first. ",
    "The one in the middle is wider, and a short walk away. ",
    "The lowest reaches down to the river, and nothing that was brought down is lost in winter. ",
    "Nobody grows again what only has to be fetched. ",
    "\n\n",
    "The book of the fields says:\n",
]
NOT_IN_BOOK = "not in the book"

KEEPER, CROP, ROW, SUM, SEQUENCE = range(5)
KINDS = ["keeper", "crop", "row", "sum", "sequence"]
SHARES = [0.42, 0.22, 0.24, 0.06, 0.06]
WORDINGS = {
    KEEPER: ["Who keeps row {}?", "By whom is row {} kept?", "Name the keeper of row {}.",
             "Who is the keeper of row {}?"],
    CROP: ["What grows in row {}?", "Which crop is in row {}?", "Name the crop of row {}.",
           "What is grown in row {}?"],
    ROW: ["Which row does {} keep?", "Where does {} work?", "Name the row of {}.", "Which row is kept by {}?"],
    SUM: ["What is {}?", "Add {}.", "How much is {}?"],
    SEQUENCE: ["What comes after {}?", "Continue {}.", "What follows {}?"],
}
# Questions about a row or keeper that the book does not have.
UNANSWERABLE = 0.15
ROW_NUMBERS = 10_000
NAME_BYTES = (2, 32)
CROP_BYTES_MAX = 24
QUESTION_BYTES_MAX = 120


class Row(typing.NamedTuple):
    """One line of a book."""

    number: int
    crop: str
    keeper: str

    def line(self):
        return f"Row {self.number}: {self.crop}, kept by {self.keeper}.\n"


class Question(typing.NamedTuple):
    """A question and its right answer."""

    kind: int
    text: str
    answer: str
    answerable: bool


@functools.cache
def test_lists():
    """The lists that training never sees: entries by file name without its ending."""
    return {path.stem: [line for line in path.read_text(encoding="utf-8").splitlines() if line]
            for path in sorted(TEST_LISTS.glob("*.txt"))}


def words_of(entries):
    """The words of names or crops, without regard to case."""
    return {word.casefold() for entry in entries for word in entry.replace("-", " ").split()}


@functools.cache
def excluded_words():
    """The words of all test lists."""
    return words_of(entry for entries in test_lists().values() for entry in entries)


class Names:
    """Makes up names and crops that contain no word of the test lists."""

    STYLES = ["listed", "altered", "syllables", "letters", "ascii", "script", "repetitive"]
    WEIGHTS = [0.12, 0.13, 0.25, 0.14, 0.16, 0.14, 0.06]

    def __init__(self, source):
        self.source = source

    def keeper(self, style):
        low, high = NAME_BYTES
        return self._accepted(lambda: self._words(style), low, high)

    def crop(self, style):
        make = self._listed_crop if style == "listed" else lambda: self._words(style, capitals=False)
        return self._accepted(make, 2, CROP_BYTES_MAX)

    def altered(self, text):
        """A text that differs from another in one character."""
        return self._accepted(lambda: self._edit(text), *NAME_BYTES)

    def _accepted(self, make, low, high):
        while True:
            text = make().strip()
            allowed = low <= len(text.encode()) <= high and ", kept by " not in text
            if allowed and not excluded_words() & words_of([text]):
                return text

    def _words(self, style, capitals=True):
        source = self.source
        if style == "listed":
            return f"{source.choice(FIRST_NAMES)} {source.choice(LAST_NAMES)}"
        if style == "altered":
            name = f"{source.choice(FIRST_NAMES)} {source.choice(LAST_NAMES)}" if capitals else source.choice(CROPS)
            for _ in range(source.choice([1, 1, 2])):
                name = self._edit(name)
            return name
        count = source.choice([1, 2, 2, 2, 2, 3, 4]) if capitals else source.choice([1, 1, 1, 2])
        script = source.choice(SCRIPTS)
        separator = "-" if source.random() < 0.04 else " "
        return separator.join(self._word(style, script, capitals) for _ in range(count))

    def _word(self, style, script, capitals):
        source = self.source
        if style == "syllables":
            word = "".join(source.choices(SYLLABLES, k=source.choice([1, 2, 2, 3]))) + source.choice(CODAS)
        elif style == "letters":
            word = "".join(source.choices(string.ascii_lowercase, k=source.randint(1, 10)))
        elif style == "ascii":
            word = "".join(source.choices(string.printable[:94], k=source.randint(1, 9)))
            return word
        elif style == "script":
            word = "".join(chr(source.randint(*source.choice(script))) for _ in range(source.randint(2, 6)))
            return word if source.random() < 0.5 else word.capitalize()
        else:
            part = "".join(source.choices(string.ascii_lowercase, k=source.randint(1, 3)))
            word = part * source.randint(2, 4)
        if not capitals:
            return word
        case = source.random()
        return word.capitalize() if case < 0.8 else word.upper() if case < 0.9 else word

    def _edit(self, text):
        source = self.source
        at = source.randrange(len(text))
        letter = source.choice(string.ascii_lowercase)
        kind = source.randrange(4)
        if kind == 0:
            return text[:at] + letter + text[at + 1:]
        if kind == 1:
            return text[:at] + letter + text[at:]
        if kind == 2:
            return text[:at] + text[at + 1:]
        return text[:at] + text[at:at + 2][::-1] + text[at + 2:]

    def _listed_crop(self):
        return self.source.choice(CROPS)


class Book:
    """Rows with different numbers, and questions about them."""

    def __init__(self, rows, names, source):
        self.rows = rows
        self.names = names
        self.source = source
        self.numbers = {row.number for row in rows}
        keepers = [row.keeper for row in rows]
        self.keepers = set(keepers)
        repeated = len(self.keepers) < len(keepers)
        counts = {}
        for keeper in keepers if repeated else ():
            counts[keeper] = counts.get(keeper, 0) + 1
        self.with_one_row = [row for row in rows if counts.get(row.keeper, 1) == 1]

    @classmethod
    def made_up(cls, names, source, bytes_max):
        """A book of at least one row, whose lines otherwise have at most so many bytes together."""
        styles = source.choices(Names.STYLES, Names.WEIGHTS, k=source.choice([1, 1, 2, 3]))
        crop_styles = source.choices(Names.STYLES, Names.WEIGHTS, k=2) + ["listed"]
        few_crops = [names.crop(source.choice(crop_styles)) for _ in range(min(source.choice([3, 8, 30]), 1 + bytes_max // 60))]
        similar, same_keepers = source.random() < 0.35, source.random() < 0.1
        rows, keepers, size = [], [], 0
        taken = set()
        for number in row_numbers(source, max(1, bytes_max // 18)):
            if same_keepers and keepers and source.random() < 0.2:
                keeper = source.choice(keepers)
            else:
                keeper = cls._keeper(names, source, styles, keepers if similar else None)
                if keeper in taken:
                    continue
            crop = source.choice(few_crops) if source.random() < 0.7 else names.crop(source.choice(crop_styles))
            row = Row(number, crop, keeper)
            size += len(row.line().encode())
            if size > bytes_max and rows:
                break
            rows.append(row)
            keepers.append(keeper)
            taken.add(keeper)
        return cls(rows, names, source)

    @staticmethod
    def _keeper(names, source, styles, others):
        """A new name, or one that resembles a name of the book."""
        fresh = names.keeper(source.choice(styles))
        if not others or source.random() < 0.5:
            return fresh
        other = source.choice(others)
        if source.random() < 0.4:
            return names.altered(other)
        first, last = other.split(" ")[0], fresh.split(" ")[-1]
        mixed = f"{first} {last}" if source.random() < 0.6 else f"{last} {other.split(' ')[-1]}"
        return mixed if NAME_BYTES[0] <= len(mixed.encode()) <= NAME_BYTES[1] else fresh

    def text(self):
        return "".join(row.line() for row in self.rows)

    def question(self, about, unanswerable=UNANSWERABLE, kind=None):
        """A question about the row with this index, about a row that is missing, or without regard to the book."""
        source = self.source
        if kind is None:
            kind = source.choices(range(5), SHARES)[0]
        if kind == SUM:
            a, b = source.randrange(100), source.randrange(100)
            return self._asked(kind, f"{a} + {b}", str(a + b), True)
        if kind == SEQUENCE:
            begin, step = source.randrange(60), 1 + source.randrange(12)
            terms = [str(begin + step * term) for term in range(5)]
            return self._asked(kind, ", ".join(terms[:4]), terms[4], True)
        if not self.rows or source.random() < unanswerable:
            missing = self._missing_keeper() if kind == ROW else str(self._missing_number())
            return self._asked(kind, missing, NOT_IN_BOOK, False)
        if kind == ROW:
            if not self.with_one_row:
                return self.question(about, unanswerable, KEEPER)
            row = self.with_one_row[about % len(self.with_one_row)]
            return self._asked(kind, row.keeper, str(row.number), True)
        row = self.rows[about % len(self.rows)]
        return self._asked(kind, str(row.number), row.keeper if kind == KEEPER else row.crop, True)

    def _asked(self, kind, about, answer, answerable):
        return Question(kind, self.source.choice(WORDINGS[kind]).format(about), answer, answerable)

    def _missing_number(self):
        """A number that no row has; half of the time one that resembles a row's."""
        source = self.source
        for _ in range(20):
            number = source.randrange(source.choice([100, 1000, ROW_NUMBERS]))
            if self.rows and source.random() < 0.5:
                digits = list(str(source.choice(self.rows).number))
                digits[source.randrange(len(digits))] = source.choice(string.digits)
                number = int("".join(digits))
            if number not in self.numbers:
                return number
        return next(number for number in range(ROW_NUMBERS, 10 * ROW_NUMBERS) if number not in self.numbers)

    def _missing_keeper(self):
        """A name that no row has; half of the time one that resembles a keeper's."""
        source = self.source
        style = source.choices(Names.STYLES, Names.WEIGHTS)[0]
        while True:
            name = self.names.keeper(style)
            if self.rows and source.random() < 0.5:
                other = source.choice(self.rows).keeper
                name = self.names.altered(other) if source.random() < 0.5 else \
                    f"{other.split(' ')[0]} {name.split(' ')[-1]}"
            if name not in self.keepers and len(name.encode()) <= NAME_BYTES[1]:
                return name


def row_numbers(source, count):
    """Different numbers: from 1 on or from a range, in any order, ascending or descending."""
    if source.random() < 0.4:
        begin = 1 if source.random() < 0.6 else source.randrange(ROW_NUMBERS - count)
        numbers = list(range(begin, begin + count))
        source.shuffle(numbers)
        # The rows that fit are then those with the first numbers, or any.
        numbers = numbers if source.random() < 0.5 else sorted(numbers)
    else:
        limit = source.choice([100, 1000, ROW_NUMBERS, ROW_NUMBERS])
        numbers = source.sample(range(max(limit, 2 * count)), count)
    order = source.random()
    return sorted(numbers) if order < 0.2 else sorted(numbers, reverse=True) if order < 0.25 else numbers


class Text:
    """Tokens up to a length, with the answers marked."""

    def __init__(self, length):
        self.length = length
        self.tokens = []
        self.kinds = []
        self.numbers = []
        self.questions = []

    def add(self, piece):
        """Appends a mark, or text that is part of no answer."""
        tokens = [piece] if isinstance(piece, int) else piece.encode()
        self.tokens.extend(tokens)
        self.kinds.extend([-1] * len(tokens))
        self.numbers.extend([-1] * len(tokens))

    def answer(self, question, end):
        """Appends an answer and the mark after it."""
        tokens = [*question.answer.encode(), end]
        self.tokens.extend(tokens)
        self.kinds.extend([question.kind] * len(tokens))
        self.numbers.extend([len(self.questions)] * len(tokens))
        self.questions.append(question)

    def room(self):
        return self.length - len(self.tokens)

    def padded(self):
        """The tokens, the kind that each answers or -1, and its question's number or -1, all of the full length."""
        tokens = numpy.full(self.length, END, numpy.int16)
        kinds, numbers = numpy.full((2, self.length), -1, numpy.int16)
        count = len(self.tokens)
        tokens[:count], kinds[:count], numbers[:count] = self.tokens, self.kinds, self.numbers
        return tokens, kinds, numbers


def opening(text, source, role, has_preface):
    """The marks and the prose before a book; `role` is None outside of chats."""
    text.add(BEGIN)
    if role is not None:
        text.add(role)
    if has_preface and source.random() < 0.4:
        whole = source.random() < 0.5
        for sentence in PREFACE:
            if whole or source.random() < 0.5:
                text.add(sentence)


def ask(text, question, is_chat, in_message):
    """Appends a question and its answer, if there is room; `in_message` says whether a message is open."""
    size = len(question.text.encode()) + len(question.answer.encode()) + 4
    if size > text.room():
        return False
    if is_chat and not in_message:
        text.add(USER)
    text.add(question.text)
    if is_chat:
        text.add(END_OF_MESSAGE)
        text.add(ASSISTANT)
    else:
        text.add("\n")
    text.answer(question, END_OF_MESSAGE if is_chat else END)
    return True


def training_text(names, source, length):
    """A text of this length: a book that fills any share of it, and questions to its end."""
    text = Text(length)
    is_chat = source.random() < 0.3
    has_book = source.random() > 0.03
    # Some chats have the book in a message by itself, before the one with the question.
    is_apart = is_chat and has_book and source.random() < 0.3
    role = source.choice([SYSTEM, USER]) if is_apart else USER if is_chat else None
    opening(text, source, role, has_book and length > 1000)
    room = text.room() - min(QUESTION_BYTES_MAX, length // 3)
    share = source.uniform(0.05, 0.6) if source.random() < 0.5 else source.uniform(0.6, 1.0)
    book = Book.made_up(names, source, int(room * share)) if has_book else Book([], names, source)
    text.add(book.text())
    if book.rows and source.random() < 0.3:
        text.add("\n")
    in_message = is_chat and not is_apart
    if is_apart:
        text.add(END_OF_MESSAGE)
    order = []
    misses = 0
    while misses < 3:
        if not order:
            order = source.sample(range(max(1, len(book.rows))), max(1, len(book.rows)))
        if ask(text, book.question(order.pop()), is_chat, in_message):
            in_message = False
        else:
            misses += 1
    return text


def batch(source_seed, length, count):
    """Texts of one length as arrays `[text][token]`: tokens, kinds and question numbers. The seed decides everything."""
    source = random.Random(source_seed)
    names = Names(source)
    texts = [training_text(names, source, length).padded() for _ in range(count)]
    return tuple(numpy.stack(part) for part in zip(*texts))
