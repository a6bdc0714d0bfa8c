//! Looks whether a GPU computes and copies what it should, and how fast: correctness of the model, sameness of answers
//! wherever KV comes from, the link, and figures. Prints a table and ends with 1 if anything is wrong.
//!
//! `gpu_check` does all of it but `steps`, which prints tables for `terrace replay --calibrate`; `gpu_check PART...`
//! does some.

mod engine;
mod figures;
mod model;
mod sameness;
mod table;
mod world;

use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use table::Table;
use terrace_cuda::Context;

/// What is done, by name.
const PARTS: [(&str, Part); 8] = [
    ("transformers", model::like_transformers),
    ("cuts", sameness::however_it_is_cut),
    ("choices", model::choices),
    ("sameness", engine::sameness),
    ("prefill", figures::prefill),
    ("decode", figures::decode),
    ("first", engine::first_tokens),
    ("steps", figures::steps),
];

type Part = fn(&Arc<Context>, &mut Table) -> Done;
type Done = Result<(), Box<dyn std::error::Error>>;

fn main() -> ExitCode {
    let wanted: Vec<String> = std::env::args().skip(1).collect();
    let unknown = wanted.iter().find(|name| PARTS.iter().all(|(part, _)| part != name));
    if let Some(unknown) = unknown {
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
        let is_wanted =
            (wanted.is_empty() && name != "steps") || wanted.iter().any(|it| it == name);
        if is_wanted && let Err(error) = part(&context, &mut table) {
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
