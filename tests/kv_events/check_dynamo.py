"""Dynamo's KV indexer follows a server's events. Its view of the cache is compared with the
server's hits for the same prompts."""

import contextlib
import json
import random
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent / "clients"))
from server import PATIENCE_S, metric, server  # noqa: E402

PAGE = 16
MODEL = "m"


def post(url, body):
    request = urllib.request.Request(
        url, json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=PATIENCE_S) as answer:
        return json.load(answer)


def free_port():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return taken.getsockname()[1]


@contextlib.contextmanager
def indexer():
    """Starts Dynamo's indexer, waits until it answers, and yields its address."""
    address = f"http://127.0.0.1:{(port := free_port())}"
    command = [sys.executable, "-m", "dynamo.indexer", "--port", str(port), "--threads", "1"]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        end = time.monotonic() + PATIENCE_S
        while True:
            try:
                with urllib.request.urlopen(f"{address}/health", timeout=5):
                    break
            except OSError:
                if time.monotonic() > end or process.poll() is not None:
                    raise
                time.sleep(0.1)
        yield address
    finally:
        process.kill()
        process.wait()


def believed(index, tokens, salt=None):
    """Returns the number of a prompt's tokens that Dynamo assumes to be cached, on device or
    host."""
    question = {"token_ids": tokens, "model_name": MODEL}
    if salt:
        question["cache_salt"] = salt
    found = post(f"{index}/query", question)["instances"].get("1", {})
    return max(found.get("gpu", 0), found.get("cpu", 0))


def ask(address, tokens, salt=""):
    """Returns the number of a prompt's tokens that the server has found in its cache."""
    body = {"prompt": tokens, "max_tokens": 1, "cache_salt": salt}
    usage = post(f"{address}/v1/completions", body)["usage"]
    return usage["prompt_tokens_details"]["cached_tokens"]


def agree(index, address, prompts, what):
    """Checks that Dynamo's view equals the server's hits. The last token of a prompt is always
    computed, so whole pages are requested with one token more. A request changes the cache, so
    prompts are compared one by one."""
    hits = 0
    for tokens in prompts:
        settle(index, address)
        expected = believed(index, tokens)
        found = ask(address, tokens)
        if expected != found:
            sys.exit(f"{what}: Dynamo believes {expected} tokens to be cached, the server found {found}")
        hits += found
    return hits


def settle(index, address):
    """Waits until Dynamo has processed all events: a new prompt is the last one."""
    settle.number += 1
    word = [settle.number] * PAGE + [0]
    ask(address, word)
    end = time.monotonic() + 30
    while believed(index, word) < PAGE:
        if time.monotonic() > end:
            sys.exit("Dynamo did not hear of a prompt")
        time.sleep(0.02)


settle.number = 0


def main():
    random.seed(7)
    events, replay = (f"tcp://127.0.0.1:{free_port()}" for _ in range(2))
    documents = [[random.randrange(250) for _ in range(20 * PAGE)] for _ in range(12)]
    lengths = [PAGE * random.randrange(1, 20) + 1 for _ in range(40)]
    prompts = [random.choice(documents)[:length] for length in lengths]
    arguments = ["--kv-events", events, "--kv-events-replay", replay]
    arguments += ["--kv-events-topic", "kv@pod-1@model", "--kv-events-buffer", "8"]
    # Room for a part of the documents, so that pages are evicted from device and host.
    sizes = ["--device-memory", "8MiB", "--host-memory", "12MiB"]
    with server(*arguments, sizes=sizes) as address, indexer() as index:
        # More events are published before Dynamo starts than the history keeps.
        for tokens in prompts[:12]:
            ask(address, tokens)
        worker = {"instance_id": 1, "endpoint": events, "replay_endpoint": replay}
        post(f"{index}/register", {**worker, "model_name": MODEL, "block_size": PAGE})
        end = time.monotonic() + PATIENCE_S
        while metric(address, "terrace_kv_event_subscribers") < 1:
            assert time.monotonic() < end, "Dynamo did not come"
            time.sleep(0.1)
        time.sleep(0.5)
        # The last first: the others may be evicted.
        late = agree(index, address, prompts[11::-1], "of what was told before it came")
        assert late > 0, "nothing was cached"
        hits = agree(index, address, prompts, "while pages come and go")
        assert metric(address, "terrace_evicted_pages_total") > 0, "no page had to go"
        assert hits > 0

        salted = documents[0][: 4 * PAGE + 1]
        ask(address, salted, "dynamo-cache-salt:alice")
        settle(index, address)
        assert believed(index, salted, "alice") == 4 * PAGE, "a salt's pages are found by it"
        assert believed(index, salted, "bob") == 0, "and by no other"

        post(f"{address}/reset_prefix_cache", {})
        settle(index, address)
        left = sum(believed(index, tokens) for tokens in prompts)
        assert left == 0, f"Dynamo believes {left} tokens to be cached after a reset"
        replays = metric(address, "terrace_kv_event_replays_total")
    print(
        f"Dynamo agrees about {len(prompts) + 12} prompts, {late + hits} tokens of which were cached; it asked "
        f"{replays:.0f} times for what it had missed"
    )


if __name__ == "__main__":
    main()
