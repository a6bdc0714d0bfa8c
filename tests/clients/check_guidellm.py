"""guidellm against the server: every request is answered, with the requested number of tokens."""

import json
import pathlib
import sys
import tempfile

import folder
from server import metric, run, server

HERE = pathlib.Path(__file__).parent
FIRST_TOKENS = "terrace_time_to_first_token_seconds"
REQUESTS, INPUT, OUTPUT = 6, 400, 12
# Tokens of a chat beside its content.
MARKS = 4


def benchmark(address, work, request_format):
    """guidellm's report of the requests, by how they ended."""
    report = work / "report.json"
    run(
        *(pathlib.Path(sys.executable).parent / "guidellm", "run", "--disable-console"),
        *("--backend", f"kind=openai_http,target={address},request_format={request_format}"),
        *("--tokenizer", f"kind=huggingface_auto,model={work}"),
        *("--data", f"kind=synthetic_text,prompt_tokens={INPUT},output_tokens={OUTPUT}"),
        *("--profile", "kind=concurrent,streams=2"),
        *("--constraint", f"kind=max_requests,count={REQUESTS}"),
        *("--output", f"kind=json,path={report}"),
        # The data sets must not use it in place of the real one.
        PYTHONPATH=str(HERE / "without_torch"),
        USE_TORCH="0",
        # One process starts faster than ten, and two streams keep none of them busy.
        GUIDELLM__MAX_WORKER_PROCESSES="1",
    )
    (benchmark,) = json.loads(report.read_text())["benchmarks"]
    return benchmark["requests"]


def check(requests, server_s, what):
    answered = requests["successful"]
    assert not requests["errored"], requests["errored"]
    assert len(answered) == REQUESTS, f"{len(answered)} were answered, and not {requests['incomplete']}"
    for request in answered:
        assert request["output_tokens"] == OUTPUT, request
        assert 0 <= request["prompt_tokens"] - INPUT <= MARKS, request
        assert 0 < request["time_to_first_token_ms"] < 1000 * request["request_latency"], request
        assert request["inter_token_latency_ms"] > 0, request
        assert request["output_tokens_per_iteration"] <= 2, "a chunk for a token, or nearly so"
    first_ms = [request["time_to_first_token_ms"] for request in answered]
    assert 0 < 1000 * server_s <= sum(first_ms), f"{first_ms} ms, {server_s} s by the server"
    gap_ms = [request["inter_token_latency_ms"] for request in answered]
    print(f"guidellm, {what}: first token after {sum(first_ms) / REQUESTS:.0f} ms, ", end="")
    print(f"then one each {sum(gap_ms) / REQUESTS:.1f} ms")


def main():
    with tempfile.TemporaryDirectory() as work, server() as address:
        work = pathlib.Path(work)
        folder.make_tokenizer(work)
        for what in ("completions", "chat/completions"):
            before = metric(address, f"{FIRST_TOKENS}_sum")
            requests = benchmark(address, work, f"/v1/{what}")
            check(requests, metric(address, f"{FIRST_TOKENS}_sum") - before, what)


if __name__ == "__main__":
    main()
