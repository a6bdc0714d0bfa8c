//! The answers of the built-in model to questions of its evaluation.

use serde::Deserialize;
use terrace_engine::Forward;
use terrace_model::Loaded;
use terrace_scheduler::Token;

use crate::world::World;

/// The goal of the evaluation for answers about keepers, in percent.
const GOAL_PERCENT: f64 = 98.0;
/// The share of right answers of all kinds that the sample must have, in percent. Its questions are few.
const SAMPLE_PERCENT: usize = 90;
/// Near ties between two tokens may fall otherwise here than where the evaluation ran.
const DIFFERENT_MAX: usize = 1;

/// A question of the evaluation, as `model/answers/evaluate.py` writes it.
#[derive(Deserialize)]
struct Question {
    asked: String,
    prompt: String,
    answer: String,
    /// Whether the model gave the answer there.
    right: bool,
}

/// The greedy answer to a prompt, up to its end or this number of tokens.
fn greedy(loaded: &mut Loaded, prompt: &str, tokens_max: usize) -> String {
    let mut tokens = loaded.tokenizer.encode(prompt).unwrap();
    let prompt_tokens = tokens.len();
    tokens.resize(prompt_tokens + tokens_max, 0);
    let mut world = World::new(&loaded.model, 16, vec![tokens], |_| {});
    let mut answer: Vec<Token> = Vec::new();
    let mut done = 0;
    for end in prompt_tokens..prompt_tokens + tokens_max {
        let logits = world.step(&mut loaded.model, &[(0, done..end)]).remove(0);
        let best = (0..logits.len()).max_by(|a, b| logits[*a].total_cmp(&logits[*b])).unwrap();
        let best = best as Token;
        if loaded.stop_tokens.contains(&best) {
            break;
        }
        answer.push(best);
        world.append(0, end, best);
        done = end;
    }
    loaded.tokenizer.decode(&answer)
}

#[test]
fn answers_are_as_right_as_the_evaluation_says() {
    let questions: Vec<Question> =
        serde_json::from_str(include_str!("../../answers/sample.json")).unwrap();
    assert!(questions.len() > 12);
    let mut loaded = terrace_model::built_in(2);
    let (mut right, mut different) = (0, Vec::new());
    for Question { asked, prompt, answer, right: expected } in &questions {
        let found = greedy(&mut loaded, prompt, 40);
        let is_right = found == *answer;
        right += usize::from(is_right);
        if is_right != *expected {
            different.push(format!("{asked}: {found:?} instead of {answer:?}"));
        }
    }
    assert!(different.len() <= DIFFERENT_MAX, "{different:#?}");
    if terrace_model::built_in_accuracy().percent().is_some() {
        let least = questions.len() * SAMPLE_PERCENT / 100;
        assert!(right >= least, "{right} of {} answers are right", questions.len());
    }
}

#[test]
fn the_context_length_is_the_measured_one() {
    let accuracy = terrace_model::built_in_accuracy();
    assert_eq!(terrace_model::built_in(1).model.positions_max(), accuracy.context_tokens);
    if let Some(percent) = accuracy.percent() {
        assert!((GOAL_PERCENT..=100.0).contains(&percent), "{percent} %");
    }
}
