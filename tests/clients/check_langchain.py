"""LangChain against the server: chats, streams, tools and structured answers."""

import pathlib
import tempfile

import folder
from conversation import CALL, CALL_RESULT, CITY_SCHEMA, QUESTION, SYSTEM, TOOL, check_forecast
from langchain_core.messages import AIMessage, HumanMessage, SystemMessage, ToolMessage
from langchain_openai import ChatOpenAI, OpenAI
from server import PATIENCE_S, server

ANSWER = 12


def plain(chat):
    messages = [SystemMessage(SYSTEM), HumanMessage(QUESTION)]
    first, second = chat.invoke(messages), chat.invoke(messages)
    assert first.content and first.content == second.content, (first, second)
    assert first.response_metadata["finish_reason"] == "length", first
    for answer in (first, second):
        assert answer.usage_metadata["output_tokens"] == ANSWER, answer
        assert answer.usage_metadata["input_tokens"] > len(SYSTEM), answer
    assert second.usage_metadata["input_token_details"]["cache_read"] > len(SYSTEM) / 2, second

    chunks = list(chat.stream(messages))
    whole = sum(chunks[1:], chunks[0])
    assert whole.content == first.content, (whole, first)
    assert sum(1 for chunk in chunks if chunk.content) > ANSWER / 2, "an answer comes in pieces"
    assert whole.usage_metadata["output_tokens"] == ANSWER, whole.usage_metadata


def tools(chat):
    with_tool = chat.bind_tools([TOOL])
    without, offered = chat.invoke(QUESTION), with_tool.invoke(QUESTION)
    described = offered.usage_metadata["input_tokens"] - without.usage_metadata["input_tokens"]
    assert described > len("weather Says how the weather is."), "the template is shown the tools"

    called = AIMessage(content="", tool_calls=[{**rename(CALL), "type": "tool_call"}])
    history = [HumanMessage(QUESTION), called, ToolMessage(CALL_RESULT, tool_call_id=CALL["id"])]
    answer = with_tool.invoke(history)
    assert answer.content, answer
    told = answer.usage_metadata["input_tokens"] - offered.usage_metadata["input_tokens"]
    assert told > len("weather Ulm call-1" + CALL_RESULT), "the template is shown calls and results"
    streamed = list(with_tool.stream(history))
    assert "".join(chunk.content for chunk in streamed) == answer.content, streamed


def rename(call):
    return {"name": call["name"], "args": call["arguments"], "id": call["id"]}


def structured(chat):
    forecasts = chat.with_structured_output(CITY_SCHEMA, method="json_schema")
    check_forecast(forecasts.invoke(QUESTION))


def completions(model):
    text = model.invoke("Once upon a time")
    assert text and text == "".join(model.stream("Once upon a time")), text


def main():
    with tempfile.TemporaryDirectory() as work:
        folder.make_model(work)
        with server("--model", work, "--name", "tiny") as address:
            common = dict(base_url=f"{address}/v1", api_key="unused", model="tiny", temperature=0)
            common |= dict(max_tokens=ANSWER, max_retries=0, timeout=PATIENCE_S)
            chat = ChatOpenAI(**common, stream_usage=True)
            for part in (plain, tools):
                part(chat)
                print(f"LangChain, {part.__name__}: as it expects")
            structured(ChatOpenAI(**{**common, "max_tokens": 200}))
            print("LangChain, structured: as it expects")
            completions(OpenAI(**common))
            print("LangChain, completions: as it expects")


if __name__ == "__main__":
    main()
