"""The conversation of the chat clients: about the weather, with a tool that knows it."""

SYSTEM = "You are brief. " * 20
QUESTION = "How is the weather in Ulm?"
CITY_SCHEMA = {
    "title": "Forecast",
    "description": "What the weather will be.",
    "type": "object",
    "properties": {
        "city": {"type": "string", "enum": ["Ulm", "Oslo"]},
        "sunny": {"type": "boolean"},
    },
    "required": ["city", "sunny"],
    "additionalProperties": False,
}
TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Says how the weather is.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "enum": ["Ulm", "Oslo"]}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}
CALL = {"name": "weather", "arguments": {"city": "Ulm"}, "id": "call-1"}
CALL_RESULT = "sunny, 21 degrees"


def check_forecast(forecast):
    assert set(forecast) == {"city", "sunny"}, forecast
    assert forecast["city"] in ("Ulm", "Oslo") and isinstance(forecast["sunny"], bool), forecast
