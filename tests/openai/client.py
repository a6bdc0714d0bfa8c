"""OpenAI's client against the real server: existing code works unchanged."""

import contextlib
import json
import os
import pathlib
import re
import subprocess
import sys
import tempfile
import urllib.request

import openai

sys.path.insert(0, str(pathlib.Path(__file__).parent.parent / "clients"))

import folder as model_folder

TEXT = "The three tiers of a cache are device, host and store. " * 12


@contextlib.contextmanager
def server(program, *arguments, model=("--random-model",)):
    """Starts a server on a free port, and yields its address. Unless another model is given, answers have the requested length."""
    with tempfile.TemporaryDirectory() as folder:
        command = [program, "serve", *model, "--listen", "127.0.0.1:0", "--l3", f"disk:{folder}", "--l3-reserve", "0"]
        process = subprocess.Popen(
            [*command, *arguments], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        try:
            yield address_in(process)
        finally:
            process.terminate()
            process.wait(timeout=60)


def address_in(process):
    """Returns the address in the start-up summary."""
    seen = ""
    for line in process.stdout:
        seen += line
        if found := re.search(r"http://127\.0\.0\.1:\d+", line):
            return found.group()
    raise SystemExit(f"the server did not start:\n{seen}")


def completions(client, model):
    plain = client.completions.create(
        model=model, prompt=TEXT, max_tokens=12, temperature=0, extra_body={"logits_checksum": True}
    )
    again = client.completions.create(
        model=model, prompt=TEXT, max_tokens=12, temperature=0, extra_body={"logits_checksum": True}
    )
    assert plain.choices[0].finish_reason == "length", plain
    assert plain.usage.completion_tokens == 12, plain.usage
    assert plain.choices[0].text == again.choices[0].text
    assert plain.choices[0].logits_checksum == again.choices[0].logits_checksum
    details = again.usage.prompt_tokens_details
    assert details.cached_tokens > 500, details
    assert details.cached_by_tier["device"] == details.cached_tokens, details

    stream = client.completions.create(
        model=model,
        prompt=TEXT,
        max_tokens=12,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = list(stream)
    streamed = "".join(chunk.choices[0].text for chunk in chunks if chunk.choices)
    assert streamed == plain.choices[0].text, (streamed, plain)
    assert chunks[-1].usage.completion_tokens == 12, chunks[-1]
    assert sum(1 for chunk in chunks if chunk.choices) > 3, "an answer comes in pieces"


def chat(client, model):
    messages = [
        {"role": "system", "content": "You are brief."},
        {"role": "user", "content": "What is a radix tree?"},
    ]
    answer = client.chat.completions.create(
        model=model, messages=messages, max_tokens=16, temperature=0
    )
    assert answer.choices[0].message.role == "assistant"
    assert answer.choices[0].message.content
    stream = client.chat.completions.create(
        model=model, messages=messages, max_tokens=16, temperature=0, stream=True
    )
    deltas = [chunk.choices[0].delta for chunk in stream]
    assert "".join(delta.content or "" for delta in deltas) == answer.choices[0].message.content

    messages += [
        {"role": "assistant", "content": answer.choices[0].message.content},
        {"role": "user", "content": "And who needs one?"},
    ]
    second = client.chat.completions.create(
        model=model, messages=messages, max_tokens=4, temperature=0
    )
    assert second.usage.prompt_tokens_details.cached_tokens > 0, "a second turn finds the first"


def sampling(client, model):
    def draw(seed, n=3):
        answer = client.completions.create(
            model=model, prompt="Once", max_tokens=8, temperature=1, top_p=0.9, seed=seed, n=n
        )
        return [choice.text for choice in answer.choices]

    assert draw(7) == draw(7)
    assert draw(7) != draw(8)
    assert len(set(draw(7))) > 1, "choices differ"

    whole = client.completions.create(model=model, prompt="Once", max_tokens=24, temperature=0)
    text = whole.choices[0].text
    stop = text[10:12]
    cut = client.completions.create(
        model=model, prompt="Once", max_tokens=24, temperature=0, stop=[stop]
    )
    assert cut.choices[0].text == text[: text.index(stop)], (cut, text)
    assert cut.choices[0].finish_reason == "stop"


def errors(client, model):
    def expect(kind, call):
        try:
            call()
        except kind as error:
            return str(error)
        raise AssertionError(f"{kind.__name__} expected")

    create = client.completions.create
    expect(openai.NotFoundError, lambda: create(model="no-such", prompt="x"))
    expect(openai.BadRequestError, lambda: create(model=model, prompt="x" * 100_000))
    expect(openai.BadRequestError, lambda: create(model=model, prompt="x", temperature=-1))
    expect(openai.BadRequestError, lambda: create(model=model, prompt="x", best_of=2))


def scores(client, model):
    def scored(prompt):
        answer = client.completions.create(
            model=model, prompt=prompt, max_tokens=4, temperature=0, logprobs=2
        )
        return answer.choices[0].logprobs, answer.usage.prompt_tokens_details.cached_tokens

    (computed, none), (cached, some) = scored("Score this. " * 20), scored("Score this. " * 20)
    assert none == 0 and some > 0
    assert computed == cached, "found in the cache or computed, they are the same"
    assert all(score <= 0 for score in computed.token_logprobs)
    assert all(len(top) == 2 for top in computed.top_logprobs)


def structured(client, model):
    schema = {
        "type": "object",
        "properties": {"ok": {"type": "boolean"}},
        "required": ["ok"],
        "additionalProperties": False,
    }
    form = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}
    ended = 0
    # A model with random weights may write blanks up to its limit; the output is then not JSON.
    for seed in range(16):
        answer = client.chat.completions.create(
            model=model,
            messages=[{"role": "user", "content": "Is it?"}],
            max_tokens=64,
            seed=seed,
            response_format=form,
        )
        [choice] = answer.choices
        if choice.finish_reason == "stop":
            assert isinstance(json.loads(choice.message.content)["ok"], bool)
            ended += 1
    assert ended > 0, "none of the answers came to its end"


def tools(client, model):
    schema = {
        "type": "object",
        "properties": {"size": {"enum": [1, 22]}},
        "required": ["size"],
        "additionalProperties": False,
    }
    tool = {"type": "function", "function": {"name": "paint", "parameters": schema, "strict": True}}
    named = {"type": "function", "function": {"name": "paint"}}
    for choice in ("required", named):
        # A model that speaks gibberish may write blanks until it is cut off.
        for seed in range(16):
            answer = client.chat.completions.create(
                model=model,
                messages=[{"role": "user", "content": "Paint it"}],
                tools=[tool],
                tool_choice=choice,
                parallel_tool_calls=False,
                max_tokens=128,
                seed=seed,
            )
            [said] = answer.choices
            if said.finish_reason == "tool_calls":
                [call] = said.message.tool_calls
                assert call.function.name == "paint", call
                assert json.loads(call.function.arguments)["size"] in (1, 22), call
                break
        else:
            raise AssertionError("none of the answers came to its end")


def responses(client, model):
    ask = {"model": model, "instructions": "Be brief.", "max_output_tokens": 12, "temperature": 0}
    answer = client.responses.create(input=TEXT, **ask)
    assert answer.status == "incomplete", answer
    assert answer.incomplete_details.reason == "max_output_tokens", answer
    assert answer.output_text and answer.usage.output_tokens == 12, answer
    again = client.responses.create(input=[{"role": "user", "content": TEXT}], **ask)
    assert again.output_text == answer.output_text
    assert again.usage.input_tokens_details.cached_tokens > 500, again.usage

    events = list(client.responses.create(input=TEXT, stream=True, **ask))
    kinds = [event.type for event in events]
    assert kinds[:2] == ["response.created", "response.in_progress"], kinds
    assert kinds[-1] == "response.incomplete", kinds
    deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert "".join(deltas) == answer.output_text and len(deltas) > 3, deltas
    with client.responses.stream(input=TEXT, **ask) as stream:
        # The client builds the response from the events, and only a complete one is final to it.
        deltas = [event.delta for event in stream if event.type == "response.output_text.delta"]
        assert "".join(deltas) == answer.output_text, deltas

    follow = [{"role": "user", "content": TEXT}, *answer.output, {"role": "user", "content": "And?"}]
    assert client.responses.create(input=follow, **ask).usage.input_tokens > answer.usage.input_tokens
    try:
        client.responses.create(input="x", model=model, previous_response_id=answer.id)
    except openai.BadRequestError as error:
        assert error.param == "previous_response_id", error
    else:
        raise AssertionError("an earlier response was accepted")


def reasoning(program):
    """A model whose prompt opens its reasoning, which gibberish never closes."""
    with tempfile.TemporaryDirectory() as folder:
        model_folder.make_model(folder)
        template = pathlib.Path(folder) / "chat_template.jinja"
        template.write_text(template.read_text().replace("'<|assistant|>' }}\n{%- endif %}", "'<|assistant|><think>\\n' }}\n{%- endif %}"))
        with server(program, model=("--model", folder)) as address:
            client = openai.OpenAI(base_url=f"{address}/v1", api_key="unused", max_retries=0)
            model = client.models.list().data[0].id
            ask = {"model": model, "temperature": 0, "messages": [{"role": "user", "content": "Why?"}], "max_tokens": 24}
            message = client.chat.completions.create(**ask).choices[0].message
            assert message.content == "" and message.reasoning_content, message
            assert message.reasoning == message.reasoning_content
            chunks = client.chat.completions.create(stream=True, **ask)
            deltas = [getattr(chunk.choices[0].delta, "reasoning_content", None) or "" for chunk in chunks]
            assert "".join(deltas) == message.reasoning_content, deltas
            answer = client.responses.create(model=model, input="Why?", temperature=0, max_output_tokens=24)
            [item] = answer.output
            assert item.type == "reasoning" and item.content[0].text == message.reasoning_content, item


def tenants(program):
    keys = ["--api-key", "alice=one", "--api-key", "bob=two", "--operator-key", "root"]
    with server(program, *keys) as address:

        def ask(key):
            client = openai.OpenAI(base_url=f"{address}/v1", api_key=key, max_retries=0)
            model = client.models.list().data[0].id
            answer = client.completions.create(model=model, prompt=TEXT, max_tokens=2)
            return answer.usage.prompt_tokens_details.cached_tokens

        assert (ask("one"), ask("two")) == (0, 0), "tenants do not share"
        assert ask("one") > 0
        try:
            ask("three")
        except openai.AuthenticationError:
            pass
        else:
            raise AssertionError("an unknown key was accepted")
        request = urllib.request.Request(
            f"{address}/metrics", headers={"Authorization": "Bearer root"}
        )
        with urllib.request.urlopen(request) as metrics:
            assert b"terrace_" in metrics.read()


def main():
    program = os.path.abspath(sys.argv[1])
    with server(program) as address:
        client = openai.OpenAI(base_url=f"{address}/v1", api_key="unused", max_retries=0)
        model = client.models.list().data[0].id
        for part in (completions, chat, sampling, scores, structured, tools, responses, errors):
            part(client, model)
            print(f"{part.__name__}: as OpenAI's client expects")
    reasoning(program)
    print("reasoning: as OpenAI's client expects")
    tenants(program)
    print("tenants: kept apart")


if __name__ == "__main__":
    main()
