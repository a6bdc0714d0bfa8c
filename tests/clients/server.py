"""A server for clients, and its metrics."""

import contextlib
import os
import re
import subprocess
import sys
import threading
import time
import urllib.request

# Long enough for a busy machine.
PATIENCE_S = 300

SIZES = ["--device-memory", "128MiB", "--host-memory", "64MiB"]


@contextlib.contextmanager
def server(*arguments, l3="none", sizes=SIZES):
    """Starts a server on a free port, waits until it is healthy, and yields its address. $TERRACE
    names the program."""
    program = os.environ["TERRACE"]
    # Without a real model, answers have the requested length.
    command = [program, "serve", "--listen", "127.0.0.1:0", "--random-model", "--l3", l3, "--l3-reserve", "0", *sizes, *arguments]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        address = address_in(process)
        wait_until_well(address)
        yield address
    finally:
        process.terminate()
        process.wait(timeout=PATIENCE_S)


def address_in(process):
    """Returns the address in the start-up summary. Later output is read and dropped."""
    seen = ""
    for line in process.stdout:
        seen += line
        if found := re.search(r"http://127\.0\.0\.1:\d+", line):
            threading.Thread(target=lambda: [None for _ in process.stdout], daemon=True).start()
            return found.group()
    raise SystemExit(f"the server did not start:\n{seen}")


def wait_until_well(address):
    end = time.monotonic() + PATIENCE_S
    while True:
        try:
            with urllib.request.urlopen(f"{address}/health", timeout=PATIENCE_S):
                return
        except OSError:
            if time.monotonic() > end:
                raise
            time.sleep(0.1)


def metric(address, name):
    """Returns the sum of all samples of a metric; a metric without samples counts as 0."""
    with urllib.request.urlopen(f"{address}/metrics", timeout=PATIENCE_S) as page:
        lines = page.read().decode().splitlines()
    samples = [line.split()[1] for line in lines if re.match(rf"{name}(\{{.*\}})? ", line)]
    return sum(map(float, samples))


def run(*command, cwd=None, **environment):
    """Runs a client to its end, and prints its output only if it fails."""
    offline = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
    done = subprocess.run(
        [str(word) for word in command],
        cwd=cwd,
        env={**os.environ, **offline, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=PATIENCE_S,
    )
    if done.returncode != 0:
        sys.exit(f"{command[0]} ended with {done.returncode}:\n{done.stdout}")
    return done.stdout
