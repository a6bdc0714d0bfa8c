//! Checks that the model computes what transformers computes, and samples as the CPU does.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::{Arc, mpsc};

use parking_lot::Mutex;
use terrace_cuda::{Context, CudaLlama, CudaTicket};
use terrace_engine::{
    Arrival, Batch, Choice, Chooser, Choosing, Chosen, Constraint, Continuation, Grammar,
    GrammarError, Sampling, Shaping, Span, StepLimits, StepTicket, Wanted,
};
use terrace_kit::Dice;
use terrace_scheduler::{Slot, Token};

use crate::Done;
use crate::table::Table;
use crate::world::{Part, World, greedy, small};

/// A folder with a model, and the logits that transformers computes for some tokens.
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
    /// Logits by number of preceding tokens.
    logits: BTreeMap<usize, Vec<f32>>,
}

/// Checks that logits of models from folders equal those of transformers, within bf16 precision.
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

/// Writes the logits behind lists of tokens to a folder with a model, for an external comparison.
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

/// Returns the logits behind tokens that are computed at once.
fn logits_of(
    world: &mut World,
    tokens: &[Token],
) -> Result<Box<[f32]>, Box<dyn std::error::Error>> {
    let output = world.step(&[Part::new(0, 0, tokens)])?.into_iter().next();
    let logits = output.and_then(|output| output.chosen).and_then(|chosen| chosen.logits);
    Ok(logits.ok_or("no logits came")?)
}

/// A grammar that allows random tokens, and sometimes only stop tokens.
#[derive(Debug)]
struct Drawn {
    seed: u64,
    tokens: u64,
    vocabulary: usize,
}

impl Grammar for Drawn {
    fn advance(&mut self, _token: Token) -> Result<(), GrammarError> {
        self.tokens += 1;
        Ok(())
    }

    fn allowed(&mut self) -> Result<Vec<u32>, GrammarError> {
        let mut dice = Dice::new(self.seed << 32 | self.tokens);
        let mut allowed = vec![0; self.vocabulary.div_ceil(32)];
        if (self.seed + self.tokens).is_multiple_of(4) {
            allowed[0] = 1 << END;
        } else {
            allowed.fill_with(|| dice.word() as u32);
        }
        Ok(allowed)
    }
}

/// Grammars of rows; none after an error.
type Constraints = Mutex<Option<Vec<Option<Constraint>>>>;

const END: Token = 3;
const ROWS: u32 = 24;
const STEPS: u32 = 12;

/// Checks that the device samples as the CPU does by the same logits, also behind an awaited token.
pub(crate) fn choices(context: &Arc<Context>, table: &mut Table) -> Done {
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
        let ends: Arc<[Token]> = Arc::new([END]);
        Choosing { sampling, shaping, ends, prompt, logprobs: Some(5), logits: true }
    };
    let constraints = || -> Vec<Option<Constraint>> {
        let of_row = |row: u32| {
            let (seed, vocabulary) = (row.into(), shape.vocabulary);
            let drawn = || Constraint::new(Box::new(Drawn { seed, tokens: 0, vocabulary }));
            (row % 3 == 1).then(drawn)
        };
        (0..ROWS).map(of_row).collect()
    };
    for is_awaited in [false, true] {
        let mut world = World::new(context, CudaLlama::random(context, &shape)?, limits, 64)?;
        let mut chooser = Chooser::new(ROWS);
        for row in 0..ROWS {
            world.come(row, choosing(row), &[]);
        }
        let came = |row| Arrival::new(Slot(row), Arc::new(choosing(row)));
        let told = Batch { came: (0..ROWS).map(came).collect(), ..Batch::default() };
        chooser.tell(&told);
        let compared = Compared {
            chooser,
            constraints: constraints(),
            vocabulary: shape.vocabulary,
            differ: 0,
            complete: 0,
            logprobs_off: 0.0,
        };
        let on_device: &Constraints = &Mutex::new(Some(constraints()));
        // A launch ahead waits for masks, which wait for tokens, so another thread receives the
        // tokens.
        let compared = std::thread::scope(|scope| {
            let (launched, tickets) = mpsc::channel();
            let (tell_tokens, tokens) = mpsc::channel();
            let comparing = scope.spawn(move || compared.all(tickets, on_device, &tell_tokens));
            let mut last = vec![0; ROWS as usize];
            for step in 0..STEPS {
                let part = |row: u32| {
                    let tokens = if step == 0 {
                        prompts[row as usize].clone()
                    } else {
                        vec![last[row as usize]]
                    };
                    let start = if step == 0 { 0 } else { 19 + step };
                    let awaited = (is_awaited && step > 0).then_some(row as usize);
                    let constraints = on_device.lock();
                    let of_row = constraints.as_ref().ok_or("tokens could not be taken in")?;
                    let mask = of_row[row as usize].as_ref().map(|it| it.mask(step));
                    let part = Part::new(row, start, &tokens);
                    Ok::<_, String>(Part { index: Some(step), awaited, mask, ..part })
                };
                let parts: Result<Vec<Part>, String> = (0..ROWS).map(part).collect();
                let launch = parts.and_then(|parts| world.launch(&parts).map_err(text));
                let is_sent = launch.and_then(|ticket| launched.send((step, ticket)).map_err(text));
                match is_sent {
                    Ok(()) if is_awaited => {}
                    Ok(()) => match tokens.recv() {
                        Ok(tokens) => last = tokens,
                        Err(_) => break,
                    },
                    Err(error) => {
                        eprintln!("{error}");
                        break;
                    }
                }
            }
            drop(launched);
            comparing.join().expect("it does not panic")
        })?;
        let Compared { differ, complete, logprobs_off, .. } = compared;
        let what =
            format!("choices as by the CPU{}", if is_awaited { ", a step ahead" } else { "" });
        let found = format!(
            "{differ} of {} differ, logprobs by {logprobs_off:.1e}, {complete} grammars complete",
            ROWS * STEPS
        );
        table.check(&what, &found, differ == 0 && complete > 0 && logprobs_off < 1e-4);
    }
    Ok(())
}

/// Converts an error to a message that can be sent to another thread.
fn text(error: impl std::fmt::Display) -> String {
    error.to_string()
}

/// Compares tokens sampled on the device with those that the CPU samples by the same logits.
struct Compared {
    chooser: Chooser,
    constraints: Vec<Option<Constraint>>,
    vocabulary: usize,
    differ: usize,
    complete: usize,
    logprobs_off: f32,
}

impl Compared {
    /// Compares all steps. Grammars consume the tokens that the device has chosen.
    fn all(
        mut self,
        tickets: mpsc::Receiver<(u32, CudaTicket)>,
        on_device: &Constraints,
        tokens: &mpsc::Sender<Vec<Token>>,
    ) -> Result<Self, String> {
        let mut steps = 0;
        for (step, ticket) in tickets {
            if let Err(error) = self.one(step, ticket, on_device, tokens) {
                // Masks stop waiting for tokens.
                *on_device.lock() = None;
                return Err(error);
            }
            steps += 1;
        }
        if steps == STEPS { Ok(self) } else { Err(format!("only {steps} steps were launched")) }
    }

    fn one(
        &mut self,
        step: u32,
        ticket: CudaTicket,
        on_device: &Constraints,
        tokens: &mpsc::Sender<Vec<Token>>,
    ) -> Result<(), String> {
        let outputs = ticket.finish().result.map_err(text)?;
        let chosen: Vec<_> = outputs.iter().filter_map(|it| it.chosen.as_ref()).collect();
        let last: Vec<Token> = chosen.iter().map(|chosen| chosen.token).collect();
        let push = |constraints: &[Option<Constraint>]| {
            for (constraint, &token) in constraints.iter().zip(&last) {
                constraint.iter().for_each(|constraint| constraint.push(token));
            }
        };
        push(on_device.lock().as_deref().unwrap_or_default());
        let logits: Vec<f32> =
            chosen.iter().filter_map(|it| it.logits.as_ref()).flatten().copied().collect();
        let expected = self.by_cpu(step, &logits)?;
        push(&self.constraints);
        for (chosen, expected) in chosen.iter().zip(&expected) {
            let is_same =
                chosen.token == expected.token && chosen.continuation == expected.continuation;
            self.differ += usize::from(!is_same);
            self.complete += usize::from(chosen.continuation == Continuation::Complete);
            let (a, b) = (chosen.logprobs.as_ref(), expected.logprobs.as_ref());
            let (a, b) = (a.ok_or("no logprobs")?, b.ok_or("no logprobs")?);
            let mut off = |a: f32, b: f32| self.logprobs_off = self.logprobs_off.max((a - b).abs());
            if is_same {
                off(a.logprob, b.logprob);
            }
            let tops = || a.top.iter().zip(&b.top);
            tops().for_each(|(a, b)| off(a.1, b.1));
            self.differ += usize::from(a.top.len() != 5 || tops().any(|(a, b)| a.0 != b.0));
        }
        let _ = tokens.send(last);
        Ok(())
    }

    /// Samples by logits on the CPU.
    fn by_cpu(&mut self, step: u32, logits: &[f32]) -> Result<Vec<Chosen>, String> {
        let span = |row: u32| Span {
            slot: Slot(row),
            start: 0,
            tokens: row as usize..row as usize + 1,
            logits: 1,
        };
        let wanted = |span: usize| {
            let mask = self.constraints[span].as_ref().map(|it| it.mask(step));
            Wanted { span, choice: Some(Choice { index: step, mask }), scored: 0..0 }
        };
        let batch = Batch {
            spans: (0..ROWS).map(span).collect(),
            tokens: vec![0; ROWS as usize],
            wanted: (0..ROWS as usize).map(wanted).collect(),
            ..Batch::default()
        };
        self.chooser.begin(&batch);
        self.chooser.take(&batch, self.vocabulary, logits);
        let outputs = self.chooser.end(&batch).map_err(text)?;
        Ok(outputs.into_iter().filter_map(|output| output.chosen).collect())
    }
}
