"""A producer and a consumer as separate processes: ``python peers.py produce|consume PLACE SETTINGS
...``.

They communicate by lines of text on standard input and output; refs are sent as text.
"""

from __future__ import annotations

import json
import sys

import numpy as np

import terrace_kv as terrace

ELEMENTS = 1 << 17


def sample(number: int, elements: int = ELEMENTS) -> dict[str, np.ndarray]:
    """The tensors of a sample, derived from its number, so that any wrong byte is detected."""
    return {
        "hidden": np.random.default_rng(number).standard_normal((8, elements // 8), np.float32),
        "tokens": np.arange(number, number + 100, dtype=np.int64),
    }


def is_sample(number: int, found: dict[str, np.ndarray]) -> bool:
    return all((found[name] == tensor).all() for name, tensor in sample(number).items())


def produce(store: terrace.Store, max_hold: float) -> None:
    """Puts samples one after the other, and prints their refs."""
    features = terrace.FeatureStore(store, owner=1, max_hold=max_hold, durable=True)
    number = 0
    while True:
        print("putting", flush=True)
        print(features.put(str(number), sample(number)).text, flush=True)
        number += 1


def consume(store: terrace.Store) -> None:
    """Reads the sample of each given ref, prints whether all of it is right, and releases it on
    request."""
    features = terrace.FeatureStore(store)
    for line in sys.stdin:
        ref = terrace.FeatureRef(line)
        try:
            is_right = is_sample(int(ref.sample), features.get(ref))
        except terrace.Gone:
            print("gone", flush=True)
            continue
        print("right" if is_right else "WRONG", flush=True)
        if sys.stdin.readline().strip() == "release":
            print(features.release(ref), flush=True)


def main() -> None:
    what, place, settings, *others = sys.argv[1:]
    store = terrace.Store(place, **json.loads(settings))
    if what == "produce":
        produce(store, float(others[0]))
    else:
        consume(store)


if __name__ == "__main__":
    main()
