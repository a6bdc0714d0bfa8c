//! Text to tokens and back.

use serde_json::{Value, json};

use crate::client::post;
use crate::world::World;

async fn ask(world: &World, path: &str, body: Value) -> Value {
    let response = post(world.address, path, &body).await;
    assert_eq!(response.status, 200, "{response:?}");
    response.json()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_prompt_is_counted_as_it_would_be_computed() {
    let world = World::quick().await;
    let told = ask(&world, "/tokenize", json!({ "prompt": "hi", "model": "toy" })).await;
    let expected = json!({ "count": 3, "max_model_len": 65_536, "tokens": [256, 104, 105], "token_strs": null });
    assert_eq!(told, expected);
    let bare = json!({ "prompt": "hi", "add_special_tokens": false, "return_token_strs": true });
    let told = ask(&world, "/tokenize", bare).await;
    assert_eq!((&told["tokens"], &told["token_strs"]), (&json!([104, 105]), &json!(["h", "i"])));

    let mut chat = json!({ "messages": [{ "role": "user", "content": "hi" }] });
    let told = ask(&world, "/tokenize", chat.clone()).await;
    assert_eq!(told["tokens"], json!([256, 259, 104, 105, 261, 260]));
    chat["max_tokens"] = 1.into();
    let answer = ask(&world, "/v1/chat/completions", chat.clone()).await;
    assert_eq!(answer["usage"]["prompt_tokens"], told["count"]);
    chat["add_generation_prompt"] = false.into();
    assert_eq!(ask(&world, "/tokenize", chat).await["count"], 5);
}

#[tokio::test(flavor = "multi_thread")]
async fn tokens_become_text_again_with_their_marks() {
    let world = World::quick().await;
    let told = ask(&world, "/detokenize", json!({ "tokens": [256, 0xc3, 0x9f, 261] })).await;
    assert_eq!(told, json!({ "prompt": "<|begin|>ß<|end|>" }));
    let wrong = [
        ("/detokenize", json!({ "tokens": [300] }), 400),
        ("/detokenize", json!({ "tokens": "x" }), 400),
        ("/detokenize", json!({}), 400),
        ("/tokenize", json!({}), 400),
        ("/tokenize", json!({ "prompt": ["x"] }), 400),
        ("/tokenize", json!({ "prompt": "x", "model": "other" }), 404),
        ("/tokenize", json!({ "prompt": "x", "chat_template": "x" }), 400),
    ];
    for (path, body, status) in wrong {
        assert_eq!(post(world.address, path, &body).await.status, status, "{body}");
    }
    let long = json!({ "prompt": "x".repeat(5 << 20) });
    assert_eq!(post(world.address, "/tokenize", &long).await.status, 413);
}
