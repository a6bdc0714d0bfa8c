"""A server to ask, and what it says about itself."""

import contextlib
import os
import re
import subprocess
import sys
import threading
import time
import urllib.request

# Long enough for a machine that does ten other things.
PATIENCE_S = 300

SIZES = ["--device-memory", "128MiB", "--host-memory", "64MiB"]


@contextlib.contextmanager
def server(*arguments, l3="none", sizes=SIZES):
    """A server on a free port, once it is well, and its address. $TERRACE names the program."""
    program = os.environ["TERRACE"]
    # Without a model of their own, clients get answers as long as they ask for.
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
    """The address that the start-up summary names. What is said after it is read and forgotten."""
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
    """The sum of all samples of a metric; of one that nothing was counted in yet there may be none."""
    with urllib.request.urlopen(f"{address}/metrics", timeout=PATIENCE_S) as page:
        lines = page.read().decode().splitlines()
    samples = [line.split()[1] for line in lines if re.match(rf"{name}(\{{.*\}})? ", line)]
    return sum(map(float, samples))


def run(*command, cwd=None, **environment):
    """Runs a client to its end. Only a failing one is heard."""
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
