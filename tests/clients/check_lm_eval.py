"""lm-eval against the server: log-likelihoods of prompts are those of the server, also with cached
prompts."""

import json
import math
import pathlib
import sys
import tempfile
import urllib.request

import folder
from server import PATIENCE_S, run, server

TASKS = pathlib.Path(__file__).parent / "lm_eval_tasks"
CHOICES, TEXT = "terrace_choices", "terrace_text"


def evaluate(address, work, name):
    """Runs both tasks. Returns the results, and the samples of each task."""
    out = work / name
    arguments = {
        "model": "terrace-random",
        "base_url": f"{address}/v1/completions",
        "tokenizer_backend": "huggingface",
        "tokenizer": work / "tokenizer",
        "max_retries": 1,
        "timeout": PATIENCE_S,
    }
    run(
        *(pathlib.Path(sys.executable).parent / "lm_eval", "run", "--model", "local-completions"),
        *("--model_args", ",".join(f"{key}={value}" for key, value in arguments.items())),
        *("--tasks", f"{CHOICES},{TEXT}", "--include_path", TASKS),
        *("--output_path", out, "--log_samples"),
        cwd=TASKS,
        HF_HOME=str(work / "cache"),
    )
    (results,) = out.glob("**/results_*.json")
    return (json.loads(results.read_text())["results"], *(samples(out, task) for task in (CHOICES, TEXT)))


def samples(out, task):
    (path,) = out.glob(f"**/samples_{task}_*.jsonl")
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    return sorted(lines, key=lambda line: line["doc_id"])


def ask(address, prompt, **fields):
    """Returns the log-probabilities of the tokens of a prompt."""
    body = {"prompt": prompt, "max_tokens": 1, "temperature": 0, "echo": True, "logprobs": 1, **fields}
    request = urllib.request.Request(
        f"{address}/v1/completions",
        json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=PATIENCE_S) as reply:
        answer = json.load(reply)
    return answer["choices"][0]["logprobs"]["token_logprobs"][:-1]


def check_choices(address, samples):
    """Checks that each log-likelihood is the sum over the tokens of the ending, which are bytes."""
    for sample in samples:
        for place, (answer, choice) in enumerate(zip(sample["filtered_resps"], sample["doc"]["choices"])):
            ending = f" {choice}".encode()
            prompt = [*sample["doc"]["question"].encode(), *ending]
            computed = ask(address, prompt, cache_salt=f"{sample['doc_id']} {place}")
            cached = ask(address, prompt)
            assert computed == cached, (computed, cached)
            assert computed[0] is None, "nothing comes before the first token"
            assert all(value <= 0 for value in computed[1:]), computed
            expected = sum(computed[-len(ending) :])
            assert math.isclose(float(answer[0]), expected, rel_tol=1e-6), (answer, expected)


def check_text(address, samples):
    for sample in samples:
        text = sample["doc"]["text"].encode()
        values = ask(address, [folder.BEGIN, *text])
        (answer,) = sample["filtered_resps"]
        likelihood = answer[0] if isinstance(answer, list) else answer
        assert math.isclose(float(likelihood), sum(values[1:]), rel_tol=1e-6), (answer, values)


def main():
    with tempfile.TemporaryDirectory() as work, server() as address:
        work = pathlib.Path(work)
        (work / "tokenizer").mkdir()
        folder.make_tokenizer(work / "tokenizer")
        results, choices, texts = evaluate(address, work, "first")
        check_choices(address, choices)
        check_text(address, texts)

        perplexity = results[TEXT]["byte_perplexity,none"]
        # A uniform model would have a perplexity of the number of bytes.
        assert 1 < perplexity < math.inf, perplexity
        accuracy = results[CHOICES]["acc,none"]
        assert 0 <= accuracy <= 1, accuracy
        print(f"lm-eval: {perplexity:.1f} perplexity of a byte, {accuracy:.2f} of the choices right")

        again, choices_again, texts_again = evaluate(address, work, "second")
        assert again == results, (results, again)
        for first, second in zip(choices + texts, choices_again + texts_again):
            assert first["filtered_resps"] == second["filtered_resps"], (first, second)
        print("lm-eval: the same figures again")


if __name__ == "__main__":
    main()
