//! Chat templates with tools and thoughts, as folders of Qwen3 have them.

use serde_json::json;
use terrace_model::{Conversation, FunctionCall, Message, ToolCall, ToolKind, load};

use crate::folder::Folder;

/// Uses the constructs of Qwen3's templates: thoughts of the last turn only, consecutive tool results in one message, and a
/// variable that turns thinking off.
const WITH_THOUGHTS: &str = r#"
{%- if tools %}
    {{- '[system]' }}
    {%- if messages[0].role == 'system' %}
        {{- messages[0].content + '|' }}
    {%- endif %}
    {%- for tool in tools %}
        {{- "\n" }}
        {{- tool | tojson }}
    {%- endfor %}
{%- else %}
    {%- if messages[0].role == 'system' %}
        {{- '[system]' + messages[0].content }}
    {%- endif %}
{%- endif %}
{%- set ns = namespace(searching=true, asked=messages|length - 1) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages|length - 1) - loop.index0 %}
    {%- if ns.searching and message.role == "user" and message.content is string and not(message.content.startswith('<result>') and message.content.endswith('</result>')) %}
        {%- set ns.searching = false %}
        {%- set ns.asked = index %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if message.content is string %}
        {%- set content = message.content %}
    {%- else %}
        {%- set content = '' %}
    {%- endif %}
    {%- if (message.role == "user") or (message.role == "system" and not loop.first) %}
        {{- '[' + message.role + ']' + content }}
    {%- elif message.role == "assistant" %}
        {%- set thought = '' %}
        {%- if message.reasoning_content is defined and message.reasoning_content is not none %}
            {%- set thought = message.reasoning_content %}
        {%- else %}
            {%- if '</think>' in content %}
                {%- set thought = content.split('</think>')[0].rstrip('\n').split('<think>')[-1].lstrip('\n') %}
                {%- set content = content.split('</think>')[-1].lstrip('\n') %}
            {%- endif %}
        {%- endif %}
        {{- '[assistant]' }}
        {%- if loop.index0 > ns.asked and (loop.last or (not loop.last and thought)) %}
            {{- '<think>' + thought.strip('\n') + '</think>' }}
        {%- endif %}
        {{- content.lstrip('\n') }}
        {%- if message.tool_calls %}
            {%- for tool_call in message.tool_calls %}
                {%- if (loop.first and content) or (not loop.first) %}
                    {{- ';' }}
                {%- endif %}
                {%- if tool_call.function %}
                    {%- set tool_call = tool_call.function %}
                {%- endif %}
                {{- '<tool_call>' + tool_call.name + ' ' }}
                {%- if tool_call.arguments is string %}
                    {{- tool_call.arguments }}
                {%- else %}
                    {{- tool_call.arguments | tojson }}
                {%- endif %}
            {%- endfor %}
        {%- endif %}
    {%- elif message.role == "tool" %}
        {%- if loop.first or (messages[loop.index0 - 1].role != "tool") %}
            {{- '[user]' }}
        {%- endif %}
        {{- '<result>' + content + '</result>' }}
        {%- if loop.last or (messages[loop.index0 + 1].role != "tool") %}
            {{- '[end]' }}
        {%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '[assistant]' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think></think>' }}
    {%- endif %}
{%- endif %}"#;

#[test]
fn templates_with_thoughts_tools_and_enable_thinking_are_rendered() {
    let folder = Folder::qwen3().write();
    std::fs::write(folder.path().join("chat_template.jinja"), WITH_THOUGHTS).unwrap();
    let chat = load(folder.path(), 1).unwrap().chat;
    let mut calls = Message::new("assistant", "<think>\nhm\n</think>\n\nlet me look");
    for (name, arguments) in [("f", json!({ "a": 1 })), ("g", json!("{}"))] {
        calls.tool_calls.push(ToolCall {
            id: None,
            kind: ToolKind::Function,
            function: FunctionCall { name: name.to_owned(), arguments },
        });
    }
    let mut earlier = Message::new("assistant", "yes");
    earlier.more.insert("reasoning_content".to_owned(), json!("forgotten"));
    let messages = vec![
        Message::new("system", "be nice"),
        Message::new("user", "one?"),
        earlier,
        Message::new("user", "two?"),
        calls,
        Message::new("tool", "1"),
        Message::new("tool", "2"),
    ];
    let conversation =
        Conversation { tools: vec![json!({ "name": "f" })], ..Conversation::new(messages) };
    let said = "[system]be nice|\n{\"name\": \"f\"}[user]one?[assistant]yes[user]two?[assistant]\
                <think>hm</think>let me look;<tool_call>f {\"a\": 1};<tool_call>g {}\
                [user]<result>1</result><result>2</result>[end][assistant]";
    assert_eq!(chat.render(&conversation).unwrap(), said);
    for (thinks, end) in [(true, ""), (false, "<think></think>")] {
        let variables = [("enable_thinking".to_owned(), json!(thinks))].into_iter().collect();
        let text = chat.render(&Conversation { variables, ..conversation.clone() }).unwrap();
        assert_eq!(text, format!("{said}{end}"));
    }
    let plain = vec![Message::new("system", "be nice"), Message::new("user", "hi")];
    let plain = chat.render(&Conversation::new(plain)).unwrap();
    assert_eq!(plain, "[system]be nice[user]hi[assistant]");
}
