//! The forward pass against the reference implementation: folders and logits from
//! Hugging Face's transformers, made by `tests/fixtures/generate.py`.

use std::collections::BTreeMap;
use std::path::Path;

use serde::Deserialize;
use terrace_scheduler::Token;

use crate::world::World;

#[derive(Deserialize)]
struct Expected {
    tokens: Vec<Token>,
    /// By number of tokens.
    logits: BTreeMap<usize, Vec<f32>>,
}

fn check(name: &str) {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures").join(name);
    let expected = std::fs::read_to_string(folder.join("logits.json")).unwrap();
    let expected: Expected = serde_json::from_str(&expected).unwrap();
    let mut model = terrace_model::load(&folder, 2).unwrap().model;
    assert_eq!(expected.logits.len(), 4);
    for (count, expected_logits) in expected.logits {
        let mut world = World::new(&model, 16, vec![expected.tokens[..count].to_vec()], |_| {});
        let logits = world.step(&mut model, &[(0, 0..count)]).remove(0);
        assert_eq!(logits.len(), expected_logits.len());
        for (token, (found, expected)) in logits.iter().zip(&expected_logits).enumerate() {
            let difference = (found - expected).abs();
            assert!(difference < 5e-5, "{name}, {count} tokens, logit {token}: {found} {expected}");
        }
    }
}

#[test]
fn a_llama_with_scaled_positions_has_the_logits_of_transformers() {
    check("llama");
}

#[test]
fn a_qwen3_with_norms_of_queries_and_keys_has_the_logits_of_transformers() {
    check("qwen3");
}

#[test]
fn a_qwen2_with_biases_and_tied_embeddings_has_the_logits_of_transformers() {
    check("qwen2");
}
