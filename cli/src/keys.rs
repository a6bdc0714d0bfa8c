//! `terrace keys`: the page keys of a prompt.

use std::error::Error;
use std::fmt::Write;
use std::io::Read;

use serde::Serialize;
use terrace_cache::{Namespace, PageKey, Passage, Sequence, Token};

/// Arguments of `terrace keys`.
#[derive(clap::Args)]
pub(crate) struct Arguments {
    /// Tokens, separated by commas or white space; `-` reads them from standard input
    tokens: String,
    /// Model and weights
    #[arg(long, default_value = "model")]
    model: String,
    /// Memory layout of KV in a page
    #[arg(long, default_value = "")]
    layout: String,
    /// Element type of the KV
    #[arg(long, default_value = "")]
    dtype: String,
    /// Tokens per page
    #[arg(long, default_value_t = 16, value_parser = terrace_replay::page_size)]
    page_size: u32,
    /// Tensor-parallel ranks
    #[arg(long, default_value_t = 1)]
    ranks: u32,
    /// LoRA adapter
    #[arg(long, default_value = "")]
    adapter: String,
    /// Salt of the tenant
    #[arg(long, default_value = "")]
    salt: String,
    /// Secret of the servers that share an L3
    #[arg(long, default_value = "")]
    secret: String,
    /// Positions that stand for other content, such as an image: START..END=CONTENT, with the key of the
    /// content in 32 hexadecimal digits. May be repeated, in order of START
    #[arg(long = "passage", value_name = "PASSAGE", value_parser = passage)]
    passages: Vec<Passage>,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

#[derive(Serialize)]
struct Keys<'a> {
    namespace: PageKey,
    keys: &'a [PageKey],
}

pub(crate) fn run(arguments: &Arguments) -> Result<String, Box<dyn Error>> {
    let page_size = arguments.page_size;
    let namespace = Namespace {
        model: arguments.model.clone(),
        layout: arguments.layout.clone(),
        dtype: arguments.dtype.clone(),
        page_size,
        tensor_ranks: arguments.ranks,
        adapter: arguments.adapter.clone(),
        salt: arguments.salt.clone(),
        secret: arguments.secret.clone(),
    }
    .digest();
    let mut text = arguments.tokens.clone();
    if text == "-" {
        text.clear();
        std::io::stdin().read_to_string(&mut text)?;
    }
    let sequence =
        Sequence::with_passages(namespace, page_size, tokens(&text)?, &arguments.passages)?;
    let keys = &sequence.keys().to_vec()[..];
    if arguments.json {
        return Ok(serde_json::to_string_pretty(&Keys { namespace, keys })? + "\n");
    }
    let mut output = format!("namespace {namespace}\n");
    for (page, key) in keys.iter().enumerate() {
        writeln!(output, "page {page:4} {key}")?;
    }
    let rest = sequence.len() - keys.len() * page_size as usize;
    if rest > 0 {
        writeln!(output, "{rest} tokens do not fill a page: only whole pages are cached")?;
    }
    Ok(output)
}

fn passage(text: &str) -> Result<Passage, String> {
    let parts = text.split_once('=').and_then(|(range, key)| Some((range.split_once("..")?, key)));
    let ((start, end), key) =
        parts.ok_or("write it like 5..69=00112233445566778899aabbccddeeff")?;
    let position =
        |text: &str| text.parse().map_err(|_| format!("{text} is not a position in the prompt"));
    let content = Some(key.parse()?);
    Ok(Passage { start: position(start)?, end: position(end)?, content, is_whole: false })
}

fn tokens(text: &str) -> Result<Vec<Token>, String> {
    text.split(|c: char| c == ',' || c.is_whitespace())
        .filter(|word| !word.is_empty())
        .map(|word| {
            word.parse().map_err(|_| format!("{word} is not a token: use numbers below 2^32"))
        })
        .collect()
}
