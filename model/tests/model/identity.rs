//! The result for a token depends on the tokens up to it alone, to the bit.

use std::ops::Range;

use terrace_engine::Forward;
use terrace_kit::Dice;
use terrace_model::Llama;

use crate::folder::Folder;
use crate::world::{World, bits};

/// Lengths around the borders of pages, of tiles of keys and of blocks of rows.
const LENGTHS: [usize; 12] = [1, 2, 15, 16, 17, 127, 255, 256, 257, 300, 512, 530];

/// Results: all KV, and the logits after each end of a span.
#[derive(PartialEq)]
struct Computed {
    kv: Vec<Vec<u32>>,
    logits: Vec<(usize, Vec<u32>)>,
}

fn assert_same(found: &Computed, expected: &Computed, what: &str) {
    for (position, (found, expected)) in found.kv.iter().zip(&expected.kv).enumerate() {
        assert!(found == expected, "KV at {position} differs: {what}");
    }
    for (end, logits) in &found.logits {
        let (_, expected) = &expected.logits[end - 1];
        assert!(logits == expected, "logits after {end} tokens differ: {what}");
    }
}

/// One token after the other, alone, in pages that lie in order.
fn token_by_token(model: &mut Llama, tokens: &[u32]) -> Computed {
    compute(model, 16, tokens, &vec![1; tokens.len()], 0, &mut None)
}

/// Computes the tokens in spans of these lengths, beside this number of other sequences, with pages in the
/// order that the dice give.
fn compute(
    model: &mut Llama,
    page_size: u32,
    tokens: &[u32],
    spans: &[usize],
    others: usize,
    dice: &mut Option<Dice>,
) -> Computed {
    let mut sequences = vec![Vec::new(); others + 1];
    let slot = others / 2;
    for (other, sequence) in sequences.iter_mut().enumerate() {
        *sequence = match other == slot {
            true => tokens.to_vec(),
            false => Dice::new(other as u64).tokens(400, model.vocabulary()),
        };
    }
    let mut world = World::new(model, page_size, sequences, |pages| {
        if let Some(dice) = dice {
            dice.shuffle(pages);
        }
    });
    let mut logits = Vec::new();
    let mut ends = vec![0; others + 1];
    for span in spans {
        let start: usize = ends[slot];
        let mut parts: Vec<(usize, Range<usize>)> = vec![(slot, start..start + span)];
        for other in (0..=others).filter(|other| *other != slot) {
            let count = dice.as_mut().map_or(1, |dice| 1 + dice.place(40));
            let end = (ends[other] + count).min(400);
            if ends[other] < end {
                parts.insert(other.min(parts.len()), (other, ends[other]..end));
                ends[other] = end;
            }
        }
        ends[slot] = start + span;
        let place = parts.iter().position(|(part, _)| *part == slot).unwrap();
        let rows = world.step(model, &parts);
        logits.push((ends[slot], bits(&rows[place])));
    }
    assert_eq!(ends[slot], tokens.len());
    Computed { kv: world.kv(model, slot), logits }
}

fn random_spans(dice: &mut Dice, tokens: usize, span_max: usize) -> Vec<usize> {
    let mut spans = Vec::new();
    let mut left = tokens;
    while left > 0 {
        let span = 1 + dice.place(span_max.min(left));
        spans.push(span);
        left -= span;
    }
    spans
}

#[test]
fn one_span_computes_what_single_tokens_do() {
    for folder in [Folder::llama(), Folder::qwen2(), Folder::qwen3()] {
        let mut model = folder.load().unwrap().model;
        let tokens = Dice::new(5).tokens(530, model.vocabulary());
        let expected = token_by_token(&mut model, &tokens);
        for length in LENGTHS {
            let tokens = &tokens[..length];
            let found = compute(&mut model, 16, tokens, &[length], 0, &mut None);
            assert!(found.kv.iter().flatten().all(|bits| !f32::from_bits(*bits).is_nan()));
            assert_same(&found, &expected, &format!("one span of {length}"));
        }
    }
}

#[test]
fn neither_spans_nor_neighbours_nor_places_of_pages_change_a_bit() {
    let mut model = Folder::llama().load().unwrap().model;
    let tokens = Dice::new(6).tokens(530, model.vocabulary());
    let expected = token_by_token(&mut model, &tokens);
    for seed in 0..24 {
        let mut dice = Dice::new(seed);
        let tokens = &tokens[..LENGTHS[dice.place(LENGTHS.len())].max(100)];
        let span_max = [3, 20, 150, 530][dice.place(4)];
        let spans = random_spans(&mut dice, tokens.len(), span_max);
        let (others, page_size) = (dice.place(4), [1, 4, 16, 64, 256][dice.place(5)]);
        let what = format!("seed {seed}, pages of {page_size}, {others} others, spans {spans:?}");
        let found = compute(&mut model, page_size, tokens, &spans, others, &mut Some(dice));
        assert_same(&found, &expected, &what);
    }
}

#[test]
fn the_number_of_threads_changes_no_bit() {
    let folder = Folder::llama().write();
    let mut computed = [1, 2, 5].into_iter().map(|threads| {
        let mut model = terrace_model::load(folder.path(), threads).unwrap().model;
        let tokens = Dice::new(7).tokens(300, model.vocabulary());
        let spans = [200, 100];
        compute(&mut model, 16, &tokens, &spans, 1, &mut Some(Dice::new(1)))
    });
    let expected = computed.next().unwrap();
    assert!(computed.all(|found| found == expected));
}

#[test]
fn the_built_in_model_keeps_the_law_too() {
    let mut model = terrace_model::built_in(2).model;
    let tokens = Dice::new(8).tokens(280, 256);
    let expected = token_by_token(&mut model, &tokens);
    let mut dice = Dice::new(9);
    let spans = random_spans(&mut dice, tokens.len(), 120);
    let found = compute(&mut model, 16, &tokens, &spans, 2, &mut Some(dice));
    assert_same(&found, &expected, "the built-in model");
}

#[test]
fn a_row_among_thirty_two_is_computed_as_if_it_were_alone() {
    for mut model in [terrace_model::built_in(2).model, Folder::qwen2().load().unwrap().model] {
        let tokens = Dice::new(11).tokens(40, 256);
        let expected = token_by_token(&mut model, &tokens);
        for others in [7, 14, 15, 16, 31] {
            let found = compute(&mut model, 16, &tokens, &[1; 40], others, &mut None);
            assert_same(&found, &expected, &format!("beside {others} others"));
        }
    }
}

#[test]
fn a_repeated_step_writes_the_same() {
    let mut model = Folder::llama().load().unwrap().model;
    let tokens = Dice::new(10).tokens(40, model.vocabulary());
    let mut world = World::new(&model, 16, vec![tokens], |_| {});
    let first = world.step(&mut model, &[(0, 0..40)]);
    let kv = world.kv(&model, 0);
    world.step(&mut model, &[(0, 7..20)]);
    assert!(world.step(&mut model, &[(0, 20..40)]) == first);
    assert!(world.kv(&model, 0) == kv);
}

#[test]
fn logits_are_the_same_whether_a_span_wants_one_row_or_all() {
    for mut model in [terrace_model::built_in(2).model, Folder::qwen2().load().unwrap().model] {
        // More rows than are computed together.
        let tokens = Dice::new(12).tokens(150, 256);
        let mut world = World::new(&model, 16, vec![tokens.clone()], |_| {});
        let all = world.step_by_token(&mut model, 0, 0..150);
        let mut world = World::new(&model, 16, vec![tokens], |_| {});
        let one_by_one = (0..150).map(|at| world.step(&mut model, &[(0, at..at + 1)]).remove(0));
        assert!(one_by_one.eq(all));
    }
}

#[test]
fn a_step_with_nonsense_in_it_is_refused() {
    let mut folder = Folder::llama();
    folder.config["max_position_embeddings"] = 32.into();
    let mut model = folder.load().unwrap().model;
    let sequences = vec![vec![7; 40], vec![300; 4]];
    let mut world = World::new(&model, 16, sequences, |_| {});
    let too_long = world.try_step(&mut model, &[(0, 0..33)]).unwrap_err();
    assert!(too_long.to_string().contains("33 tokens is longer than the model's 32"));
    let unknown = world.try_step(&mut model, &[(1, 0..4)]).unwrap_err();
    assert!(unknown.to_string().contains("token 300 is not one of the model's 300"));
    assert!(world.try_step(&mut model, &[(0, 0..32)]).is_ok());
}

#[test]
fn greedy_answers_of_the_random_model_are_readable_and_depend_on_the_prompt() {
    let loaded = terrace_model::random(2);
    let mut model = loaded.model;
    let mut answers = Vec::new();
    for prompt in
        ["Hello", "hello", "The capital of France is", "1 + 1 =", "The capital of Spain is"]
    {
        let mut tokens = loaded.tokenizer.encode(prompt).unwrap();
        let prompt_tokens = tokens.len();
        tokens.resize(prompt_tokens + 40, 0);
        let mut answer = Vec::new();
        let mut done = 0;
        let mut world = World::new(&model, 16, vec![tokens.clone()], |_| {});
        for end in prompt_tokens..tokens.len() {
            let logits = &world.step(&mut model, &[(0, done..end)])[0];
            let best = (0..logits.len()).max_by(|a, b| logits[*a].total_cmp(&logits[*b])).unwrap();
            answer.push(best as u32);
            world.append(0, end, best as u32);
            done = end;
        }
        let text = loaded.tokenizer.decode(&answer);
        assert!(
            text.len() == 40 && text.bytes().all(|byte| (32..=126).contains(&byte)),
            "{text:?}"
        );
        let mut different = answer.clone();
        different.sort_unstable();
        different.dedup();
        assert!(different.len() > 5, "{text:?} is dull");
        answers.push(text);
    }
    let all = answers.len();
    println!("{answers:#?}");
    answers.sort_unstable();
    answers.dedup();
    assert_eq!(answers.len(), all, "prompts have the same answers");
}
