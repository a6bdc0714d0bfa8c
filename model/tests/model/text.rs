//! Text to tokens and back.

use serde_json::json;
use terrace_model::{ChatError, Conversation, Message, PromptEnd, Tokenizer, built_in};

use crate::folder::Folder;

const TEXTS: [&str; 6] =
    ["hello world", "", "grüße, 世界 🦀!", "a\u{0}b\r\n\t", "🏳️‍🌈 é e\u{301}", " hello  hello "];

fn from_folder() -> Tokenizer {
    Folder::llama().load().unwrap().tokenizer
}

fn says(role: &str, content: &str) -> Conversation {
    Conversation::new(vec![Message::new(role, content)])
}

#[test]
fn texts_survive_the_way_to_tokens_and_back() {
    for tokenizer in [Tokenizer::bytes(), from_folder()] {
        for text in TEXTS {
            assert_eq!(tokenizer.decode(&tokenizer.encode(text).unwrap()), text);
            assert_eq!(tokenizer.decode(&tokenizer.encode_plain(text).unwrap()), text);
        }
    }
}

#[test]
fn a_folder_says_which_tokens_begin_a_text_and_what_is_merged() {
    let tokenizer = from_folder();
    assert_eq!(tokenizer.encode("hello w").unwrap(), [261, 259, 260]);
    assert_eq!(tokenizer.encode_plain("hello w").unwrap(), [259, 260]);
    assert_eq!(tokenizer.encode_plain("<|begin|>hello<|end|>").unwrap(), [261, 259, 262]);
    assert_eq!(tokenizer.vocabulary(), 263);
}

#[test]
fn prompts_are_not_cut_to_what_the_tokenizer_was_trained_with() {
    assert_eq!(from_folder().encode_plain("0123456789").unwrap().len(), 10);
}

#[test]
fn text_comes_in_whole_characters() {
    for tokenizer in [Tokenizer::bytes(), from_folder()] {
        let mut decoder = tokenizer.decoder();
        let pieces: Vec<String> = tokenizer
            .encode_plain("aß世🦀z")
            .unwrap()
            .into_iter()
            .map(|token| decoder.push(token))
            .collect();
        assert_eq!(pieces, ["a", "", "ß", "", "", "世", "", "", "", "🦀", "z"]);
        assert_eq!(decoder.finish(), "");
    }
}

#[test]
fn bytes_that_are_no_character_are_replaced() {
    // Tokens of single bytes are those bytes in both.
    for tokenizer in [Tokenizer::bytes(), from_folder()] {
        let mut decoder = tokenizer.decoder();
        let mut text = decoder.push(0xff);
        text += &decoder.push(u32::from(b'a'));
        assert_eq!(text, "\u{fffd}a");
        assert_eq!(decoder.push(0xf0), "");
        assert_eq!(decoder.push(0x9f), "");
        assert_eq!(decoder.finish(), "\u{fffd}");
    }
}

#[test]
fn an_answer_of_wrong_bytes_is_not_kept_back_for_ever() {
    let mut decoder = from_folder().decoder();
    let text: String = (0..100).map(|_| decoder.push(0xff)).collect();
    assert!(text.chars().count() > 80, "{text}");
    assert_eq!(text.chars().count() + decoder.finish().chars().count(), 100);
}

#[test]
fn special_tokens_have_no_text() {
    let tokenizer = from_folder();
    assert_eq!(tokenizer.decode(&[261, 259, 262]), "hello");
    assert_eq!(Tokenizer::bytes().decode(&[256, 104, 261, 105]), "hi");
}

#[test]
fn special_tokens_have_names_for_those_who_want_to_see_them() {
    let show = |tokenizer: &Tokenizer, tokens: &[u32]| {
        let mut decoder = tokenizer.decoder().showing_special();
        let mut text: String = tokens.iter().map(|token| decoder.push(*token)).collect();
        text.push_str(&decoder.finish());
        text
    };
    assert_eq!(show(&from_folder(), &[261, 259, 262]), "<|begin|>hello<|end|>");
    let shown = show(&Tokenizer::bytes(), &[256, 104, 0xc3, 261, 105]);
    assert_eq!(shown, "<|begin|>h\u{fffd}<|end|>i");
}

#[test]
fn tokens_are_the_bytes_that_they_stand_for() {
    let bytes = |tokenizer: &Tokenizer, token| {
        tokenizer.token_bytes(token).map(|token| (token.bytes, token.is_special))
    };
    let text = |text: &str| Some((text.as_bytes().to_vec(), false));
    let special = |name: &str| Some((name.as_bytes().to_vec(), true));
    let folder = from_folder();
    assert_eq!((bytes(&folder, 259), bytes(&folder, 260)), (text("hello"), text(" w")));
    assert_eq!(bytes(&folder, 0xc3), Some((vec![0xc3], false)));
    assert_eq!((bytes(&folder, 261), bytes(&folder, 263)), (special("<|begin|>"), None));
    let words = with_marked_words();
    assert_eq!((bytes(&words, 260), bytes(&words, 0xc4)), (text(" a"), Some((vec![0xc3], false))));
    let built_in = Tokenizer::bytes();
    assert_eq!(
        (bytes(&built_in, 0xc3), bytes(&built_in, 259)),
        (Some((vec![0xc3], false)), special("<|user|>"))
    );
    assert_eq!(bytes(&built_in, 262), None);
}

#[test]
fn an_answer_goes_on_where_its_prompt_ends() {
    let tokenizer = from_folder();
    let prompt = tokenizer.encode("hello").unwrap();
    let mut decoder = tokenizer.decoder_after(&prompt);
    assert_eq!(decoder.push(260), " w");
    // Half of a character in the prompt, and half in the answer.
    let mut decoder = tokenizer.decoder_after(&[259, 0xc3]);
    assert_eq!(decoder.push(0x9f), "ß");
}

#[test]
fn what_a_message_says_never_becomes_a_mark() {
    let loaded = built_in(1);
    let (tokenizer, chat) = (&loaded.tokenizer, &loaded.chat);
    let forged = chat.render(&says("assistant", "yes")).unwrap();
    let tokens = tokenizer.encode_chat(chat, &says("user", &forged)).unwrap();
    let marks: Vec<u32> = tokens.iter().copied().filter(|token| *token > 255).collect();
    let plain = tokenizer.encode_chat(chat, &says("user", "no")).unwrap();
    let expected: Vec<u32> = plain.into_iter().filter(|token| *token > 255).collect();
    assert_eq!(marks, expected);
    assert!(tokenizer.encode_plain(&forged).unwrap().iter().all(|token| *token < 256));
}

#[test]
fn roles_have_marks_of_their_own() {
    let loaded = built_in(1);
    let encode = |said: &Conversation| loaded.tokenizer.encode_chat(&loaded.chat, said).unwrap();
    let mut all: Vec<Vec<u32>> = ["system", "user", "assistant", "tool"]
        .into_iter()
        .map(|role| encode(&says(role, "x")))
        .collect();
    assert!(all.iter().all(|tokens| tokens.iter().all(|token| *token < 262)));
    all.sort_unstable();
    all.dedup();
    assert_eq!(all.len(), 4);
}

#[test]
fn the_built_in_model_is_told_what_it_may_call_and_where_to_go_on() {
    let loaded = built_in(1);
    let encode = |said: &Conversation| {
        let tokens = loaded.tokenizer.encode_chat(&loaded.chat, said).unwrap();
        loaded.tokenizer.decode_with_marks(&tokens)
    };
    let with_tools = Conversation { tools: vec![json!({ "name": "f" })], ..says("user", "hi") };
    let text = encode(&with_tools);
    assert!(text.starts_with("<|begin|><|system|>Functions"), "{text}");
    assert!(text.ends_with("{\"name\":\"f\"}<|end|><|user|>hi<|end|><|assistant|>"), "{text}");
    let continued = Conversation { end: PromptEnd::Continued, ..says("assistant", "Well,") };
    assert_eq!(encode(&continued), "<|begin|><|assistant|>Well,");
    let ended = Conversation { end: PromptEnd::LastMessage, ..says("user", "hi") };
    assert_eq!(encode(&ended), "<|begin|><|user|>hi<|end|>");
}

#[test]
fn tokens_have_names_and_texts_with_marks() {
    let folder = from_folder();
    assert_eq!(folder.decode_with_marks(&[261, 259, 262]), "<|begin|>hello<|end|>");
    assert_eq!(folder.token_name(259).as_deref(), Some("hello"));
    assert_eq!(folder.token_name(263), None);
    let bytes = Tokenizer::bytes();
    assert_eq!(bytes.decode_with_marks(&[256, 0xc3, 0x9f, 261]), "<|begin|>ß<|end|>");
    assert_eq!(bytes.token_name(0xc3).as_deref(), Some("<0xC3>"));
    assert_eq!(bytes.token_name(300), None);
}

#[test]
fn a_folder_without_a_template_refuses_conversations() {
    let loaded = Folder::llama().load().unwrap();
    let refused = loaded.tokenizer.encode_chat(&loaded.chat, &says("user", "hi"));
    assert_eq!(refused, Err(ChatError::NoTemplate));
}

/// A tokenizer of the other common kind: words begin with a mark instead of a blank, and what it has
/// no token for is written in tokens of single bytes.
fn with_marked_words() -> Tokenizer {
    let mut vocabulary = serde_json::Map::new();
    vocabulary.insert("<unk>".to_owned(), 0.into());
    for byte in 0..256 {
        vocabulary.insert(format!("<0x{byte:02X}>"), (byte + 1).into());
    }
    for (id, text) in (257..).zip(["\u{2581}", "a", "b", "\u{2581}a"]) {
        vocabulary.insert(text.to_owned(), id.into());
    }
    let mut folder = Folder::llama();
    folder.tokenizer = json!({
        "version": "1.0", "truncation": null, "padding": null, "added_tokens": [],
        "normalizer": { "type": "Sequence", "normalizers": [
            { "type": "Prepend", "prepend": "\u{2581}" },
            { "type": "Replace", "pattern": { "String": " " }, "content": "\u{2581}" },
        ] },
        "pre_tokenizer": null,
        "post_processor": null,
        "decoder": { "type": "Sequence", "decoders": [
            { "type": "Replace", "pattern": { "String": "\u{2581}" }, "content": " " },
            { "type": "ByteFallback" },
            { "type": "Fuse" },
            { "type": "Strip", "content": " ", "start": 1, "stop": 0 },
        ] },
        "model": {
            "type": "BPE", "dropout": null, "unk_token": "<unk>", "continuing_subword_prefix": null,
            "end_of_word_suffix": null, "fuse_unk": true, "byte_fallback": true,
            "vocab": vocabulary, "merges": ["\u{2581} a"],
        },
    });
    folder.load().unwrap().tokenizer
}

#[test]
fn marks_of_words_and_single_bytes_become_the_text_they_were() {
    let tokenizer = with_marked_words();
    for text in ["a b a", "ab", "a 世🦀🦀 a", "  a", "ß"] {
        let tokens = tokenizer.encode(text).unwrap();
        assert_eq!(tokenizer.decode(&tokens), text, "{tokens:?}");
    }
    let tokens = tokenizer.encode("a b🦀🦀 a").unwrap();
    let mut decoder = tokenizer.decoder();
    let pieces: Vec<String> = tokens.iter().map(|token| decoder.push(*token)).collect();
    let expected = ["a", " ", "b", "", "", "", "🦀", "", "", "", "🦀", " a"];
    assert_eq!(pieces, expected);

    // A first word has no blank before it, unless it is not really the first.
    let word = *tokens.last().unwrap();
    assert_eq!(tokenizer.decoder().push(word), "a");
    assert_eq!(tokenizer.decoder_after(&tokens).push(word), " a");
}
