//! Sources of traces: a file, a folder, standard input, or none.

use std::error::Error;
use std::io;
use std::path::PathBuf;

use clap::ValueEnum;
use terrace_replay::Trace;
use terrace_replay::trace::{
    BadLines, Format, ImportOptions, ReadOptions, Synthetic, Tokenise, Workload,
};

/// The arguments that say which trace is meant.
#[derive(clap::Args)]
#[command(next_help_heading = "Trace")]
pub(crate) struct Source {
    /// A trace file in any of the formats, plain or gzip; a Mooncake trace folder; - for standard input
    #[arg(conflicts_with = "synthetic")]
    trace: Option<PathBuf>,
    /// Generate synthetic requests instead
    #[arg(long, value_enum, value_name = "KIND")]
    synthetic: Option<Kind>,
    /// Number of synthetic requests [default: 5000]
    #[arg(long, requires = "synthetic")]
    requests: Option<u32>,
    /// Average request rate per second, for synthetic requests and for traces without arrival times
    /// [default: 4]
    #[arg(long, value_name = "PER_SECOND")]
    rate: Option<f64>,
    /// File format: mooncake, azure, burstgpt, sharegpt, openai (messages, one request or conversation per
    /// line) or bench (output of vLLM's and SGLang's benchmarks) [default: detected from the file]
    #[arg(long, value_name = "NAME", value_parser = format, conflicts_with = "synthetic")]
    format: Option<Format>,
    /// Folder with the tokenizer.json for traces with text [default: four characters are a token]
    #[arg(long, value_name = "FOLDER", conflicts_with = "synthetic")]
    tokenizer: Option<PathBuf>,
    /// Tokens per block, if the trace does not say [default: 512 for mooncake, 16 for other formats]
    #[arg(long, value_name = "TOKENS")]
    block_tokens: Option<u32>,
    /// What to do with invalid lines
    #[arg(long, value_enum, default_value_t = OnBadLines::Refuse)]
    bad_lines: OnBadLines,
}

/// Workloads of synthetic requests.
#[derive(Clone, Copy, ValueEnum)]
pub(crate) enum Kind {
    /// Conversations that grow turn by turn
    Chat,
    /// Agents with long instructions and many quick turns
    Agents,
    /// Questions about long documents
    Documents,
    /// Chat that comes in bursts
    Bursts,
    /// Chat, agents and documents together
    Mix,
}

impl Kind {
    fn name(self) -> &'static str {
        match self {
            Self::Chat => "chat",
            Self::Agents => "agents",
            Self::Documents => "documents",
            Self::Bursts => "bursts",
            Self::Mix => "mix",
        }
    }
}

impl From<Kind> for Workload {
    fn from(kind: Kind) -> Self {
        match kind {
            Kind::Chat => Self::Chat,
            Kind::Agents => Self::Agents,
            Kind::Documents => Self::Documents,
            Kind::Bursts => Self::Bursts,
            Kind::Mix => Self::Mix,
        }
    }
}

#[derive(Clone, Copy, ValueEnum)]
enum OnBadLines {
    /// Stop at the first invalid line
    Refuse,
    /// Skip and count invalid lines
    Skip,
}

/// Reads the name of a format.
fn format(name: &str) -> Result<Format, String> {
    let found = Format::ALL.into_iter().find(|(other, _)| other.eq_ignore_ascii_case(name));
    found.map(|(_, format)| format).ok_or_else(|| {
        let names = Format::ALL.map(|(name, _)| name).join(", ");
        format!("use one of {names}")
    })
}

impl Source {
    pub(crate) fn is_synthetic(&self) -> bool {
        self.synthetic.is_some()
    }

    /// The trace, and what to call it. Lines that were skipped are told on standard error.
    pub(crate) fn read(&self, seed: u64) -> Result<(String, Trace), Box<dyn Error>> {
        let usual = Synthetic::default();
        if let Some(kind) = self.synthetic {
            let synthetic = Synthetic {
                workload: kind.into(),
                requests: self.requests.unwrap_or(usual.requests),
                rate_per_s: self.rate.unwrap_or(usual.rate_per_s),
                seed,
                block_tokens: self.block_tokens.unwrap_or(usual.block_tokens),
            };
            return Ok((format!("synthetic {}, seed {seed}", kind.name()), synthetic.trace()?));
        }
        let bad_lines = match self.bad_lines {
            OnBadLines::Refuse => BadLines::Refuse,
            OnBadLines::Skip => BadLines::Skip,
        };
        let path = self
            .trace
            .as_deref()
            .ok_or("no TRACE: give a file or a folder, or --synthetic and a workload")?;
        let rate_per_s = self.rate.unwrap_or(usual.rate_per_s);
        if !(1e-3..=1e5).contains(&rate_per_s) {
            return Err(format!("--rate {rate_per_s}: use 0.001 to 100000").into());
        }
        let tokenizer = self.tokenizer.as_deref().map(terrace_model::load_tokenizer).transpose()?;
        let encode = |text: &str| match &tokenizer {
            Some(tokenizer) => tokenizer.encode_plain(text).map_err(|error| error.to_string()),
            None => Err("no tokenizer".to_owned()),
        };
        let options = ImportOptions {
            format: self.format,
            block_tokens: self.block_tokens,
            bad_lines,
            rate_per_s,
            seed,
            tokenise: tokenizer.as_ref().map(|_| &encode as Tokenise<'_>),
        };
        let name = match path.as_os_str() == "-" {
            true => "standard input".to_owned(),
            false => path
                .file_name()
                .map_or(path.display().to_string(), |name| name.to_string_lossy().into_owned()),
        };
        let reading = if path.as_os_str() == "-" {
            Trace::import_from(io::stdin().lock(), &name, &options)?
        } else if path.is_dir() {
            Trace::read(path, &ReadOptions { block_tokens: self.block_tokens, bad_lines })?
        } else {
            Trace::import(path, &options)?
        };
        if !reading.ignored.is_empty() {
            eprintln!("{name}: ignored columns: {}", reading.ignored.join(", "));
        }
        if reading.skipped_lines > 0 {
            for line in &reading.skipped {
                eprintln!("skipped: {line}");
            }
            eprintln!("lines skipped: {}", reading.skipped_lines);
        }
        Ok((name, reading.trace))
    }
}
