"""`vllm bench serve` against the server: its measurements agree with the server's."""

import json
import pathlib
import statistics
import sys
import tempfile

import folder
from server import metric, run, server

HERE = pathlib.Path(__file__).parent
FIRST_TOKENS = "terrace_time_to_first_token_seconds"
PROMPTS, INPUT, OUTPUT = 4, 1500, 16
# Tokens of a chat beside its content, and the tolerance in the length of random text.
MARKS = 8
# A prompt of this length takes hundreds of milliseconds to compute and a few as a hit.
TIMES_FASTER = 3


def bench(address, work, backend, endpoint):
    """Sends the same prompts twice, one after the other. Returns the figures of both runs, and the time to first token
    of all prompts together, in seconds, as the server saw it."""

    def arguments(run):
        return (
            *("--backend", backend, "--base-url", address, "--endpoint", endpoint),
            *("--model", "terrace-random", "--tokenizer", work),
            *("--dataset-name", "random", "--seed", 7, "--temperature", 0, "--max-concurrency", 1),
            *("--num-prompts", PROMPTS, "--random-input-len", INPUT, "--random-output-len", OUTPUT),
            *("--save-result", "--save-detailed", "--result-dir", work, "--result-filename", run),
        )

    before = metric(address, f"{FIRST_TOKENS}_sum")
    command = (sys.executable, HERE / "vllm_bench_serve.py")
    run(*command, *arguments("computed"), "--then", *arguments("cached"))
    figures = [json.loads((work / run).read_text()) for run in ("computed", "cached")]
    return figures, metric(address, f"{FIRST_TOKENS}_sum") - before


def check(figures):
    assert (figures["completed"], figures["failed"]) == (PROMPTS, 0), figures["errors"]
    assert figures["output_lens"] == [OUTPUT] * PROMPTS, figures["output_lens"]
    assert figures["total_output_tokens"] == PROMPTS * OUTPUT, figures["total_output_tokens"]
    assert all(0 <= length - INPUT <= MARKS for length in figures["input_lens"]), figures["input_lens"]
    for first, gaps, whole in zip(figures["ttfts"], figures["itls"], figures["latencies"]):
        assert first > 0, figures["ttfts"]
        assert OUTPUT / 2 <= len(gaps) <= OUTPUT, "a chunk for a token, or nearly so"
        assert sum(gaps) > 0, gaps
        assert abs(first + sum(gaps) - whole) < 0.001, (first, gaps, whole)


def check_together(computed, cached, server_s):
    # The client's measurements include the network.
    client_s = sum(computed["ttfts"]) + sum(cached["ttfts"])
    assert 0 < server_s <= client_s, f"{client_s} s to the first tokens, {server_s} s by the server"

    medians = [statistics.median(figures["ttfts"]) for figures in (computed, cached)]
    assert medians[0] > TIMES_FASTER * medians[1], f"computed and cached {medians} s"
    for first, gaps in zip(computed["ttfts"], computed["itls"]):
        assert gaps[0] < first, "a prompt is computed before its first token, not after"
    assert computed["generated_texts"] == cached["generated_texts"]
    return medians


def main():
    with tempfile.TemporaryDirectory() as work, server() as address:
        work = pathlib.Path(work)
        folder.make_tokenizer(work)
        for backend, endpoint in (("openai", "completions"), ("openai-chat", "chat/completions")):
            (computed, cached), server_s = bench(address, work, backend, f"/v1/{endpoint}")
            check(computed)
            check(cached)
            first, again = check_together(computed, cached, server_s)
            print(f"vllm bench serve, {endpoint}: first token after {1000 * first:.0f} ms computed, ", end="")
            print(f"{1000 * again:.0f} ms cached, then one each {computed['median_itl_ms']:.1f} ms")


if __name__ == "__main__":
    main()
