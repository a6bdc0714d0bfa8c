"""litellm against the server: chats, streams, tools, structured answers and log-probabilities."""

import json
import os
import tempfile

# Otherwise it fetches model costs from the network.
os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"

import folder
import litellm
from conversation import CALL, CALL_RESULT, CITY_SCHEMA, QUESTION, SYSTEM, TOOL, check_forecast
from server import PATIENCE_S, server

ANSWER = 12


class Client:
    def __init__(self, address):
        self.common = dict(
            model="openai/tiny",
            api_base=f"{address}/v1",
            api_key="unused",
            temperature=0,
            max_tokens=ANSWER,
            timeout=PATIENCE_S,
            num_retries=0,
        )

    def chat(self, *messages, **arguments):
        return litellm.completion(messages=list(messages), **{**self.common, **arguments})

    def complete(self, prompt, **arguments):
        model = {"model": "text-completion-openai/tiny"}
        return litellm.text_completion(prompt=prompt, **{**self.common, **model, **arguments})


def says(role, content, **more):
    return {"role": role, "content": content, **more}


def plain(client):
    messages = [says("system", SYSTEM), says("user", QUESTION)]
    first, second = client.chat(*messages), client.chat(*messages)
    text = first.choices[0].message.content
    assert text and text == second.choices[0].message.content, (first, second)
    assert first.choices[0].finish_reason == "length", first
    assert second.usage.completion_tokens == ANSWER, second.usage
    assert second.usage.prompt_tokens_details.cached_tokens > len(SYSTEM) / 2, second.usage

    chunks = list(client.chat(*messages, stream=True, stream_options={"include_usage": True}))
    pieces = [chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices]
    assert "".join(pieces) == text, (pieces, text)
    assert sum(1 for piece in pieces if piece) > ANSWER / 2, "an answer comes in pieces"
    assert chunks[-1].usage.completion_tokens == ANSWER, chunks[-1]


def tools(client):
    question = says("user", QUESTION)
    without, offered = client.chat(question), client.chat(question, tools=[TOOL])
    described = offered.usage.prompt_tokens - without.usage.prompt_tokens
    assert described > len("weather Says how the weather is."), "the template is shown the tools"

    function = {"name": CALL["name"], "arguments": json.dumps(CALL["arguments"])}
    call = {"id": CALL["id"], "type": "function", "function": function}
    called = says("assistant", None, tool_calls=[call])
    result = says("tool", CALL_RESULT, tool_call_id=CALL["id"])
    answer = client.chat(question, called, result, tools=[TOOL])
    assert answer.choices[0].message.content, answer
    told = answer.usage.prompt_tokens - offered.usage.prompt_tokens
    assert told > len("weather Ulm call-1" + CALL_RESULT), "the template is shown calls and results"


def structured(client):
    schema = {"name": "forecast", "schema": CITY_SCHEMA, "strict": True}
    answer = client.chat(
        says("user", QUESTION),
        response_format={"type": "json_schema", "json_schema": schema},
        max_tokens=200,
    )
    check_forecast(json.loads(answer.choices[0].message.content))


def log_probabilities(client):
    answer = client.chat(says("user", QUESTION), logprobs=True, top_logprobs=2)
    tokens = answer.choices[0].logprobs.content
    assert len(tokens) == ANSWER, tokens
    assert "".join(token.token for token in tokens) == answer.choices[0].message.content
    for token in tokens:
        assert token.logprob <= 0 and len(token.top_logprobs) == 2, token
        assert token.logprob == max(top.logprob for top in token.top_logprobs), "greedy is likeliest"

    completion = client.complete("Once upon a time", logprobs=1)
    assert len(completion.choices[0].logprobs.token_logprobs) == ANSWER, completion


def main():
    with tempfile.TemporaryDirectory() as work:
        folder.make_model(work)
        with server("--model", work, "--name", "tiny") as address:
            client = Client(address)
            for part in (plain, tools, structured, log_probabilities):
                part(client)
                print(f"litellm, {part.__name__.replace('_', ' ')}: as it expects")


if __name__ == "__main__":
    main()
