"""Checks which parts the program of the default build has, and which it lacks."""

import json
import os
import subprocess
import sys
import tempfile
import urllib.error
import urllib.request


def ask(address, **body):
    request = urllib.request.Request(
        f"{address}/v1/completions",
        data=json.dumps(body).encode(),
        headers={"Content-Type": "application/json"},
    )
    try:
        with urllib.request.urlopen(request, timeout=120) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


def address_of(server):
    for line in server.stderr:
        for word in line.split():
            if word.startswith("http://"):
                return word.rstrip("/").removesuffix("/v1")
    sys.exit("the server has ended without a word about its address")


def serves(program):
    with tempfile.TemporaryDirectory() as folder:
        command = [program, "serve", "--listen", "127.0.0.1:0", "--l3", f"disk:{folder}", "--l3-reserve", "0"]
        server = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        try:
            address = address_of(server)
            prompt = "The same words once more. " * 20
            answers = [ask(address, prompt=prompt, max_tokens=8, temperature=0) for _ in range(2)]
            assert [status for status, _ in answers] == [200, 200], answers
            texts = [answer["choices"][0]["text"] for _, answer in answers]
            assert texts[0] == texts[1], texts
            cached = [answer["usage"]["prompt_tokens_details"]["cached_tokens"] for _, answer in answers]
            assert cached[0] == 0 < cached[1], cached
            status, refusal = ask(address, prompt=prompt, guided_regex="a+")
            assert status == 400 and "structured-outputs" in refusal["error"]["message"], refusal
        finally:
            server.terminate()
            server.communicate(timeout=120)


def knows_models(program):
    """Folders are read, and names of the hub are looked up in the cache: both without a real model here."""
    with tempfile.TemporaryDirectory() as folder:
        environment = os.environ | {"HF_HUB_CACHE": folder, "HF_HUB_OFFLINE": "1"}
        for model, expected in [
            (folder, "config.json"),
            ("org/name", "HF_HUB_OFFLINE is set and org/name is not in the cache"),
            ("no-folder", "there is no folder"),
        ]:
            command = [program, "serve", "--model", model]
            refused = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment)
            assert refused.returncode != 0 and expected in refused.stderr, refused


def refuses_gpus(program):
    command = [program, "serve", "--device", "cuda"]
    refused = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert refused.returncode == 1 and "--features cuda" in refused.stderr, refused


def main():
    program = sys.argv[1]
    serves(program)
    print("it serves, and finds again what it has computed")
    knows_models(program)
    print("it reads models from folders and from the hub")
    refuses_gpus(program)
    print("it says what structured outputs and GPUs need")


if __name__ == "__main__":
    main()
