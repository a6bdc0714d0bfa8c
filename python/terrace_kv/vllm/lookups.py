"""Which chunks the store has, as far as the scheduler's thread needs to know."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable
from itertools import islice
from typing import Any

from ..store import FAILED
from ..transfers import Completed, Transfers

# How long an answer is believed. Requests need it in the step after the one that asked; those that wait for chunks on
# their way ask again in every step.
_SECONDS = 5.0


class Lookups:
    """Answers by key, and questions that go to the store once a step.

    ``lookup`` is called for every chunk of every request that waits, on the thread that everything waits for. So it is
    one lookup in one dictionary: a key that is new gets the answer ``retry`` and stands at the dictionary's end, where
    :meth:`flush` finds it.
    """

    def __init__(self, transfers: Transfers, *, hit: Any, miss: Any, retry: Any) -> None:
        self._transfers = transfers
        self._answers: dict[bytes, Any] = {}
        self._hit, self._miss = hit, miss
        self._verdicts = [hit] * 256
        self._verdicts[0] = self._verdicts[FAILED] = miss
        self._asked = 0
        self._questions: dict[int, list[bytes]] = {}
        self._ages: deque[tuple[float, list[bytes]]] = deque()
        self._forgotten: list[bytes] = []
        setdefault = self._answers.setdefault

        def lookup(key: bytes, _context: object) -> Any:
            return setdefault(key, retry)

        self.lookup: Callable[[bytes, object], Any] = lookup

    def flush(self) -> None:
        """Asks the store about what is new since the last time."""
        answers = self._answers
        fresh = list(islice(reversed(answers), len(answers) - self._asked))
        if fresh:
            fresh.reverse()
            job = self._transfers.submit_exists(fresh, prefetch_to_memory=True)
            self._questions[job] = fresh
        if self._forgotten or self._ages:
            self._forget()
        self._asked = len(answers)

    def answered(self, completed: Completed) -> None:
        """Takes in what the store says. What it does not know is a miss: the engine computes it."""
        keys = self._questions.pop(completed.job)
        answers = self._answers
        answers.update(zip(keys, map(self._verdicts.__getitem__, completed.codes)))
        self._ages.append((time.monotonic() + _SECONDS, keys))

    def missed(self, keys: Iterable[bytes]) -> None:
        """Chunks that could not be read are misses for a while, or they would be asked for for ever."""
        marked = [key for key in keys if key in self._answers]
        self._answers.update(dict.fromkeys(marked, self._miss))

    def forget(self, keys: Iterable[bytes]) -> None:
        """What has been stored is asked about again."""
        self._forgotten.extend(keys)

    def pending(self) -> bool:
        """Whether there are questions that the store has not answered."""
        return bool(self._questions)

    def _forget(self) -> None:
        """Only after the new keys were taken from the dictionary's end."""
        answers, in_flight = self._answers, None
        now = time.monotonic()
        while self._ages and self._ages[0][0] <= now:
            self._forgotten.extend(self._ages.popleft()[1])
        for key in self._forgotten:
            if in_flight is None:
                in_flight = {asked for keys in self._questions.values() for asked in keys}
            if key not in in_flight:
                answers.pop(key, None)
        self._forgotten.clear()
