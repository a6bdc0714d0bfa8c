//! Checks a GPU: correctness of the model, equality of answers whatever the source of their KV, the
//! link, and performance figures. Prints a table, and exits with 1 if a check fails.
//!
//! `gpu_check` runs all parts that take less than a minute; `gpu_check PART...` runs the named
//! parts. These parts run only by name:
//!
//! - `segments` measures decode steps with segments of attention of 256, 512 and 1,024 keys.
//! - `steps` prints tables for `terrace replay --calibrate`.
//! - `passes`, or `passes=N`, sends N long prompts twice; it pins 4 GiB of host memory for each.
//! - `logits=FOLDER` writes the logits of a model to `FOLDER/logits.json`, for the lists of tokens
//!   in `FOLDER/tokens.json`: see `scripts/gpu-transformers`.

mod engine;
mod figures;
mod gaps;
mod model;
mod passes;
mod sameness;
mod slowed;
mod table;
mod world;

use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use table::Table;
use terrace_cuda::Context;

/// Parts by name.
const PARTS: [(&str, Part); 16] = [
    ("transformers", Part::Usual(model::like_transformers)),
    ("cuts", Part::Usual(sameness::however_it_is_cut)),
    ("products", Part::Usual(sameness::products)),
    ("names", Part::Usual(sameness::names)),
    ("choices", Part::Usual(model::choices)),
    ("sameness", Part::Usual(engine::sameness)),
    ("prefill", Part::Usual(figures::prefill)),
    ("decode", Part::Usual(figures::decode)),
    ("behind", Part::Usual(figures::behind)),
    ("slowed", Part::Usual(slowed::slowed)),
    ("gaps", Part::Usual(gaps::gaps)),
    ("first", Part::Usual(engine::first_tokens)),
    ("segments", Part::OnDemand(|context, table, _| figures::segments(context, table))),
    ("steps", Part::OnDemand(|context, _, _| figures::steps(context))),
    ("passes", Part::OnDemand(passes::passes)),
    ("logits", Part::OnDemand(model::logits)),
];

#[derive(Clone, Copy)]
enum Part {
    /// Runs by default.
    Usual(fn(&Arc<Context>, &mut Table) -> Done),
    /// Runs if named, with the text behind a `=`.
    OnDemand(fn(&Arc<Context>, &mut Table, Option<&str>) -> Done),
}

type Done = Result<(), Box<dyn std::error::Error>>;

fn main() -> ExitCode {
    let wanted: Vec<String> = std::env::args().skip(1).collect();
    let wanted: Vec<(&str, Option<&str>)> = wanted
        .iter()
        .map(|it| it.split_once('=').map_or((it.as_str(), None), |(name, it)| (name, Some(it))))
        .collect();
    let unknown = wanted.iter().find(|(name, _)| PARTS.iter().all(|(part, _)| part != name));
    if let Some((unknown, _)) = unknown {
        let names: Vec<&str> = PARTS.iter().map(|(name, _)| *name).collect();
        eprintln!("there is no part {unknown}: they are {}", names.join(", "));
        return ExitCode::FAILURE;
    }
    let context = match Context::open(0) {
        Ok(context) => context,
        Err(error) => {
            eprintln!("{error}");
            return ExitCode::FAILURE;
        }
    };
    println!("{}, compute capability {}", context.name(), context.capability());
    let mut table = Table::default();
    for (name, part) in PARTS {
        let asked = wanted.iter().find(|(it, _)| *it == name);
        let done = match (part, asked) {
            (Part::Usual(part), Some(_)) => part(&context, &mut table),
            (Part::Usual(part), None) if wanted.is_empty() => part(&context, &mut table),
            (Part::OnDemand(part), Some((_, said))) => part(&context, &mut table, *said),
            (Part::Usual(_) | Part::OnDemand(_), None) => Ok(()),
        };
        if let Err(error) = done {
            table.wrong(name, &error.to_string());
        }
    }
    drop(context);
    table.check(
        "the GPU is given back",
        "",
        terrace_cuda::wait_until_closed(Duration::from_secs(20)),
    );
    table.end()
}
