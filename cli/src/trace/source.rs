//! Where a trace comes from: a file, a folder, standard input, or nowhere.

use std::error::Error;
use std::io;
use std::path::PathBuf;

use clap::ValueEnum;
use terrace_replay::Trace;
use terrace_replay::trace::{BadLines, ReadOptions, Synthetic, Workload};

/// The arguments that say which trace is meant.
#[derive(clap::Args)]
#[command(next_help_heading = "Trace")]
pub(crate) struct Source {
    /// A file with one request a line, plain or gzip; a folder of such files; - for standard input
    #[arg(conflicts_with = "synthetic")]
    trace: Option<PathBuf>,
    /// Requests that are made up instead
    #[arg(long, value_enum, value_name = "KIND")]
    synthetic: Option<Kind>,
    /// How many are made up [default: 5000]
    #[arg(long, requires = "synthetic")]
    requests: Option<u32>,
    /// How many of those come in a second, about [default: 4]
    #[arg(long, value_name = "PER_SECOND", requires = "synthetic")]
    rate: Option<f64>,
    /// Tokens of a block, where lines do not say it [default: 512]
    #[arg(long, value_name = "TOKENS")]
    block_tokens: Option<u32>,
    /// What to do about lines that are not understood
    #[arg(long, value_enum, default_value_t = OnBadLines::Refuse)]
    bad_lines: OnBadLines,
}

/// What users do.
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
    /// The first ends it
    Refuse,
    /// They are left out and counted
    Skip,
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
        let options = ReadOptions {
            block_tokens: self.block_tokens,
            bad_lines: match self.bad_lines {
                OnBadLines::Refuse => BadLines::Refuse,
                OnBadLines::Skip => BadLines::Skip,
            },
        };
        let path = self
            .trace
            .as_deref()
            .ok_or("no TRACE: give a file or a folder, or --synthetic and a kind of traffic")?;
        let (name, reading) = if path.as_os_str() == "-" {
            let name = "standard input";
            (name.to_owned(), Trace::read_from(io::stdin().lock(), name, &options)?)
        } else {
            let name = path
                .file_name()
                .map_or(path.display().to_string(), |name| name.to_string_lossy().into_owned());
            (name, Trace::read(path, &options)?)
        };
        if reading.skipped_lines > 0 {
            for line in &reading.skipped {
                eprintln!("skipped: {line}");
            }
            eprintln!("{} lines were skipped", reading.skipped_lines);
        }
        Ok((name, reading.trace))
    }
}
