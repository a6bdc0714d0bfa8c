"""A whole engine in pure Python: a toy model over paged KV on a device, a host and an L3 store, all
of them arrays and dictionaries here.

    python examples/engine.py

The model is the simplest one that detects a single wrong page: the KV of a token is a number
derived from all tokens before it, and the next token is derived from that of the last. So an answer
from the cache is right exactly if every page was.
"""

from __future__ import annotations

import numpy as np

from terrace_kv import Plan, Scheduler
from terrace_kv.plan import LOAD_BACK, PROBE, PREFETCH
from terrace_kv.scheduler import Outcome

PAGE_SIZE = 4
DEVICE_PAGES, HOST_PAGES = 80, 40
RUNNING_MAX = 4
VOCABULARY = 1000


def follow(before: int, token: int) -> int:
    """The KV of a token, given that of the token before it."""
    return (before * 6364136223846793005 + token + 1442695040888963407) % 2**64


class Engine:
    """Runs requests until they end."""

    def __init__(self) -> None:
        self.scheduler = Scheduler(
            {
                "model": {"fingerprint": "a toy"},
                "cache": {"page_size": PAGE_SIZE, "device_pages": DEVICE_PAGES, "host_pages": HOST_PAGES},
                "batch": {"running_max": RUNNING_MAX},
                # Computing is declared slow, so that fetching always pays.
                "rates": {"prefill_ns_per_token": 50_000_000},
                "l3": {},
            }
        )
        self.device = np.zeros((DEVICE_PAGES, PAGE_SIZE), np.uint64)
        self.host = np.zeros((HOST_PAGES, PAGE_SIZE), np.uint64)
        self.l3: dict[bytes, np.ndarray] = {}
        # One row per running request, with a column per page of the longest request.
        self.table = np.zeros((RUNNING_MAX, DEVICE_PAGES), np.uint32)
        self.answers: dict[int, list[int]] = {}
        self.live: set[int] = set()
        self.computed_tokens = 0

    def submit(self, request: int, prompt: list[int], max_new_tokens: int) -> None:
        self.scheduler.submit(request, prompt, max_new_tokens)
        self.answers[request] = []
        self.live.add(request)

    def run(self) -> None:
        """Runs until every request has ended."""
        while self.live:
            plan = self.scheduler.plan()
            self.live.difference_update(ended.request for ended in plan.ended)
            plan.apply_rows(self.table)
            # This engine runs everything at once; one with a GPU starts operations and reports them
            # when they have ended. Parts of a plan do not depend on each other.
            self.move(plan)
            if plan.step is not None:
                tokens = self.forward(plan)
                self.scheduler.step_done(plan.step, plan.producers, tokens)
                for request, token in zip(plan.producers.tolist(), tokens.tolist()):
                    self.answers[request].append(token)

    # ---- the model ----

    def kv(self, slot: int, position: int) -> tuple[int, int]:
        """The device page and the offset of a position's KV."""
        return int(self.table[slot, position // PAGE_SIZE]), position % PAGE_SIZE

    def forward(self, plan: Plan) -> np.ndarray:
        """Computes a step: writes the KV of its tokens, and chooses the next tokens of its
        producers."""
        tokens = iter(plan.tokens.tolist())
        chosen = []
        prefills = [(p["slot"], p["start"], p["tokens"], p["produces_token"]) for p in plan.prefills]
        decodes = [(d["slot"], d["start"], 1, True) for d in plan.decodes]
        for slot, start, count, produces in prefills + decodes:
            value = int(self.device[self.kv(slot, start - 1)]) if start > 0 else 1
            for position in range(start, start + count):
                value = follow(value, next(tokens))
                self.device[self.kv(slot, position)] = value
            if produces:
                chosen.append(value % VOCABULARY)
        self.computed_tokens += len(plan.tokens)
        return np.array(chosen, np.uint32)

    # ---- pages ----

    def move(self, plan: Plan) -> None:
        """Runs the copies and L3 operations of a plan."""
        for op, direction, device_pages, host_pages in plan.each_copy():
            if direction == LOAD_BACK:
                self.device[device_pages] = self.host[host_pages]
            else:
                self.host[host_pages] = self.device[device_pages]
            self.scheduler.operation(op, "done")
        for op, kind, keys, host_pages in plan.each_l3():
            names = [key.tobytes() for key in keys]
            if kind in (PROBE, PREFETCH):
                found = 0
                while found < len(names) and names[found] in self.l3:
                    if kind == PREFETCH:
                        self.host[host_pages[found]] = self.l3[names[found]]
                    found += 1
                outcome: Outcome = "done" if found == len(names) else "partial" if found else "missing"
                self.scheduler.operation(op, outcome, found)
            else:
                for name, page in zip(names, host_pages):
                    self.l3[name] = self.host[page].copy()
                self.scheduler.operation(op, "done")


def expected(prompt: list[int], tokens: int) -> list[int]:
    """The model's answer, without a cache."""
    value, answer = 1, []
    for token in prompt:
        value = follow(value, token)
    for _ in range(tokens):
        answer.append(value % VOCABULARY)
        value = follow(value, answer[-1])
    return answer


def main() -> None:
    engine = Engine()
    # Five books, and questions about each: more than fits on device or host.
    prompts = [[book] * 64 + [question] * 5 for question in range(4) for book in range(5)]
    for round_ in range(2):
        before = engine.computed_tokens
        for number, prompt in enumerate(prompts):
            engine.submit(100 * round_ + number, prompt, 8)
        engine.run()
        for number, prompt in enumerate(prompts):
            assert engine.answers[100 * round_ + number] == expected(prompt, 8), "a wrong page"
        asked = sum(len(prompt) + 8 - 1 for prompt in prompts)
        print(f"round {round_ + 1}: {len(prompts)} answers, {engine.computed_tokens - before} of {asked} tokens computed")
    stats = engine.scheduler.stats()
    print(
        f"found on device {stats['device_hit_tokens']}, on host {stats['host_hit_tokens']}, in L3 {stats['l3_hit_tokens']} "
        f"of {stats['prompt_tokens']} tokens of prompts; L3 has {len(engine.l3)} pages"
    )


if __name__ == "__main__":
    main()
