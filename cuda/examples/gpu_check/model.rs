//! Whether the model computes what others compute, and chooses what the CPU chooses.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;

use terrace_cuda::{Context, CudaLlama};
use terrace_engine::{
    Arrival, Batch, Choice, Chooser, Choosing, Chosen, Sampling, Shaping, Span, StepLimits,
    StepTicket, Wanted,
};
use terrace_kit::Dice;
use terrace_scheduler::{Slot, Token};

use crate::Done;
use crate::table::Table;
use crate::world::{Part, World, greedy, small};

/// A folder with a model, and what transformers makes of some tokens.
struct Fixture {
    name: &'static str,
    files: [(&'static str, &'static [u8]); 3],
    logits: &'static str,
}

macro_rules! fixture {
    ($name:literal) => {
        Fixture {
            name: $name,
            files: [
                (
                    "config.json",
                    include_bytes!(concat!(
                        "../../../model/tests/fixtures/",
                        $name,
                        "/config.json"
                    )),
                ),
                (
                    "tokenizer.json",
                    include_bytes!(concat!(
                        "../../../model/tests/fixtures/",
                        $name,
                        "/tokenizer.json"
                    )),
                ),
                (
                    "model.safetensors",
                    include_bytes!(concat!(
                        "../../../model/tests/fixtures/",
                        $name,
                        "/model.safetensors"
                    )),
                ),
            ],
            logits: include_str!(concat!("../../../model/tests/fixtures/", $name, "/logits.json")),
        }
    };
}

#[derive(serde::Deserialize)]
struct Expected {
    tokens: Vec<Token>,
    /// After so many tokens.
    logits: BTreeMap<usize, Vec<f32>>,
}

/// Logits of models from folders are those of transformers, as far as bf16 goes.
pub(crate) fn like_transformers(context: &Arc<Context>, table: &mut Table) -> Done {
    for fixture in [fixture!("llama"), fixture!("qwen2")] {
        let folder = tempfile::tempdir()?;
        for (file, bytes) in fixture.files {
            std::fs::write(folder.path().join(file), bytes)?;
        }
        let expected: Expected = serde_json::from_str(fixture.logits)?;
        let unloaded = terrace_model::open(folder.path())?;
        for page_size in [1, 4, 16, 64] {
            let model =
                CudaLlama::load(context, &unloaded.shape, &*unloaded.weights, &mut |_, _| {})?;
            let limits = StepLimits { page_size, rows: 4, tokens_max: 512 };
            let mut world = World::new(context, model, limits, 512)?;
            world.come(0, Choosing { logits: true, ..greedy() }, &[]);
            let mut worst = 0.0_f64;
            for (&count, expected_logits) in &expected.logits {
                let logits = logits_of(&mut world, &expected.tokens[..count])?;
                let pairs = logits.iter().zip(expected_logits);
                let difference: f64 = pairs.map(|(a, b)| f64::from(a - b).powi(2)).sum();
                let all: f64 = expected_logits.iter().map(|b| f64::from(*b).powi(2)).sum();
                worst = worst.max((difference / all).sqrt());
            }
            let what = format!("logits of {} as transformers', pages of {page_size}", fixture.name);
            table.check(&what, &format!("off by {worst:.4} at most"), worst < 0.03);
        }
    }
    Ok(())
}

/// Writes the logits behind lists of tokens to a folder with a model, for whoever compares them.
pub(crate) fn logits(context: &Arc<Context>, table: &mut Table, folder: Option<&str>) -> Done {
    let folder = Path::new(folder.ok_or("say which model: logits=FOLDER")?);
    let lists: Vec<Vec<Token>> =
        serde_json::from_slice(&std::fs::read(folder.join("tokens.json"))?)?;
    let longest = lists.iter().map(Vec::len).max().ok_or("tokens.json has no lists")? as u32;
    let unloaded = terrace_model::open(folder)?;
    let model = CudaLlama::load(context, &unloaded.shape, &*unloaded.weights, &mut |_, _| {})?;
    let limits = StepLimits { page_size: 16, rows: 1, tokens_max: longest };
    let mut world = World::new(context, model, limits, longest + 1)?;
    world.come(0, Choosing { logits: true, ..greedy() }, &[]);
    let mut found = Vec::new();
    for tokens in &lists {
        found.push(logits_of(&mut world, tokens)?);
    }
    std::fs::write(folder.join("logits.json"), serde_json::to_vec(&found)?)?;
    let what = format!("logits of {}", folder.display());
    let is_finite = found.iter().flatten().all(|logit| logit.is_finite());
    table.check(&what, &format!("{} lists of tokens", lists.len()), is_finite);
    Ok(())
}

/// The logits behind tokens that are computed at once.
fn logits_of(
    world: &mut World,
    tokens: &[Token],
) -> Result<Box<[f32]>, Box<dyn std::error::Error>> {
    let output = world.step(&[Part::new(0, 0, tokens)])?.into_iter().next();
    let logits = output.and_then(|output| output.chosen).and_then(|chosen| chosen.logits);
    Ok(logits.ok_or("no logits came")?)
}

/// Tokens are chosen as the CPU chooses them by the same logits, also behind a token that is awaited.
pub(crate) fn choices(context: &Arc<Context>, table: &mut Table) -> Done {
    const ROWS: u32 = 24;
    const STEPS: u32 = 12;
    let shape = small();
    let limits = StepLimits { page_size: 16, rows: ROWS, tokens_max: 1024 };
    let mut dice = Dice::new(11);
    let prompts: Vec<Vec<Token>> = (0..ROWS).map(|_| dice.tokens(20, shape.vocabulary)).collect();
    let choosing = |row: u32| {
        let sampling = Sampling {
            temperature: [0.0, 0.7, 1.0, 1.5][row as usize % 4],
            top_k: [0, 0, 40, 5][row as usize / 4 % 4],
            top_p: [1.0, 0.9, 0.5][row as usize % 3],
            min_p: [0.0, 0.02][row as usize / 8 % 2],
            seed: row.into(),
        };
        let shaping = match row % 5 {
            0 | 1 => Shaping::default(),
            2 => Shaping { presence_penalty: 3.0, frequency_penalty: 1.0, ..Shaping::default() },
            3 => Shaping { repetition_penalty: 1.5, ..Shaping::default() },
            _ => Shaping {
                bias: vec![(3, 9.0), (5, -2.0), (3, 1.0)],
                min_tokens: 4,
                ..Shaping::default()
            },
        };
        let prompt = prompts[row as usize].clone();
        let ends: Arc<[Token]> = Arc::new([3]);
        Choosing { sampling, shaping, ends, prompt, logprobs: Some(5), logits: true }
    };
    for is_awaited in [false, true] {
        let mut world = World::new(context, CudaLlama::random(context, &shape)?, limits, 64)?;
        let mut chooser = Chooser::new(ROWS);
        let (mut differ, mut logprobs_off) = (0, 0.0_f32);
        for row in 0..ROWS {
            world.come(row, choosing(row), &[]);
        }
        let came = |row| Arrival::new(Slot(row), Arc::new(choosing(row)));
        let told = Batch { came: (0..ROWS).map(came).collect(), ..Batch::default() };
        chooser.tell(&told);
        let mut last = vec![0; ROWS as usize];
        let mut waiting = std::collections::VecDeque::new();
        for step in 0..STEPS {
            let part = |row: u32| {
                let tokens = if step == 0 {
                    prompts[row as usize].clone()
                } else {
                    vec![last[row as usize]]
                };
                let start = if step == 0 { 0 } else { 19 + step };
                let awaited = (is_awaited && step > 0).then_some(row as usize);
                Part { index: Some(step), awaited, ..Part::new(row, start, &tokens) }
            };
            let parts: Vec<Part> = (0..ROWS).map(part).collect();
            waiting.push_back((step, world.launch(&parts)?));
            while waiting.len() > usize::from(is_awaited && step + 1 < STEPS) {
                let (step, ticket) = waiting.pop_front().expect("there is one");
                let outputs = ticket.finish().result?;
                let chosen: Vec<_> = outputs.iter().filter_map(|it| it.chosen.as_ref()).collect();
                let logits: Vec<f32> =
                    chosen.iter().filter_map(|it| it.logits.as_ref()).flatten().copied().collect();
                let expected = by_cpu(&mut chooser, step, ROWS, shape.vocabulary, &logits)?;
                for (row, (chosen, expected)) in chosen.iter().zip(&expected).enumerate() {
                    differ += usize::from(chosen.token != expected.token);
                    last[row] = chosen.token;
                    let (a, b) = (chosen.logprobs.as_ref(), expected.logprobs.as_ref());
                    let (a, b) = (a.ok_or("no logprobs")?, b.ok_or("no logprobs")?);
                    if chosen.token == expected.token {
                        logprobs_off = logprobs_off.max((a.logprob - b.logprob).abs());
                    }
                    let tops = a.top.iter().zip(&b.top);
                    differ +=
                        usize::from(a.top.len() != 5 || tops.clone().any(|(a, b)| a.0 != b.0));
                    logprobs_off =
                        tops.fold(logprobs_off, |off, (a, b)| off.max((a.1 - b.1).abs()));
                }
            }
        }
        let what =
            format!("choices as by the CPU{}", if is_awaited { ", a step ahead" } else { "" });
        let found = format!("{differ} of {} differ, logprobs by {logprobs_off:.1e}", ROWS * STEPS);
        table.check(&what, &found, differ == 0 && logprobs_off < 1e-4);
    }
    Ok(())
}

/// What the CPU chooses by logits.
fn by_cpu(
    chooser: &mut Chooser,
    step: u32,
    rows: u32,
    vocabulary: usize,
    logits: &[f32],
) -> Result<Vec<Chosen>, Box<dyn std::error::Error>> {
    let span = |row: u32| Span {
        slot: Slot(row),
        start: 0,
        tokens: row as usize..row as usize + 1,
        logits: 1,
    };
    let choice = || Some(Choice { index: step, mask: None });
    let batch = Batch {
        spans: (0..rows).map(span).collect(),
        tokens: vec![0; rows as usize],
        wanted: (0..rows as usize)
            .map(|span| Wanted { span, choice: choice(), scored: 0..0 })
            .collect(),
        ..Batch::default()
    };
    chooser.begin(&batch);
    chooser.take(&batch, vocabulary, logits);
    Ok(chooser.end(&batch)?.into_iter().filter_map(|output| output.chosen).collect())
}
