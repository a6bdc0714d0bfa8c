//! `terrace serve`: an inference server with OpenAI's interface.

use std::error::Error;
use std::io::{IsTerminal, Write};
use std::path::PathBuf;
use std::time::Duration;

use clap::ArgAction;
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use serde_json::json;
use terrace_server::{Config, Progress, ServedModel, Server, Size, launch_telling, wait_for_gpus};
use tracing_subscriber::filter::Targets;
use tracing_subscriber::layer::SubscriberExt;
use tracing_subscriber::util::SubscriberInitExt;

use crate::config;
use crate::settings::Given;
use crate::signals::Signals;

const EXAMPLES: &str = "\
Examples:
  terrace serve
      Serve the built-in model to this machine only
  terrace serve --model HuggingFaceTB/SmolLM2-135M-Instruct
      Download a model from the Hugging Face Hub and serve it
  terrace serve --model ./SmolLM2-135M-Instruct --device-memory 2GiB
      Serve a model from a folder with config.json, tokenizer.json and safetensors
  terrace serve --device cuda --model ./Llama-3.1-8B-Instruct --host-memory 64GiB
      Use the first NVIDIA GPU and all of its memory; needs a program built with `--features cuda`
  terrace serve --listen 0.0.0.0:8000 --api-key alice=KEY1 --api-key bob=KEY2 --operator-key KEY3
      Serve other machines: each tenant has its own key and cache; the operator sees metrics
  terrace serve --config terrace.toml --l3 none
      Read settings from a file; flags and TERRACE_* variables override it

All settings can also be in the file. Names there have _ instead of -, and settings under Limits are in
the table [limits]. `terrace config` prints such a file.

Ctrl-C, SIGTERM and SIGHUP stop the server after running requests have finished. A terminal sends SIGHUP
when it closes; under nohup, SIGHUP is ignored.";

/// Arguments of `terrace serve`.
#[derive(clap::Args)]
#[command(disable_help_flag = true, after_help = EXAMPLES)]
pub(crate) struct Arguments {
    /// Print the settings that most users need, and exit
    #[arg(short, long, action = ArgAction::HelpShort)]
    help: Option<bool>,
    /// Print all settings, and exit
    #[arg(long, action = ArgAction::HelpLong)]
    help_all: Option<bool>,
    /// TOML file with settings; flags and environment variables override it
    #[arg(long, value_name = "FILE", env = "TERRACE_CONFIG")]
    config: Option<PathBuf>,
    /// Print the resulting settings as a TOML file, without keys, and exit
    #[arg(long)]
    print_config: bool,
    #[command(flatten)]
    settings: Given<Config>,
}

pub(crate) fn run(arguments: &Arguments) -> Result<String, Box<dyn Error>> {
    let config = config::resolve(&arguments.settings, arguments.config.as_deref())?;
    if arguments.print_config {
        return Ok(config::print(&config));
    }
    start_log(config.log.as_deref())?;
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .thread_name("terrace-serve")
        .enable_all()
        .build()?;
    let served = runtime.block_on(serve(&config));
    // A disk that hangs must not keep the program: nobody listens for another Ctrl-C any more.
    runtime.shutdown_timeout(Duration::from_secs(1));
    wait_for_gpus(Duration::from_secs(10));
    served
}

async fn serve(config: &Config) -> Result<String, Box<dyn Error>> {
    let mut bar = StartBar::default();
    let launched = launch_telling(config, &mut |progress| bar.show(progress));
    bar.end();
    let launched = launched?;
    let example = example(&launched.model, !config.keys.is_empty());
    let engine = launched.engine.clone();
    let server = Server::bind(config, launched.engine, launched.model).await?;
    let server = server.with_gpu(launched.gpu).with_planting(launched.planting);
    let address = server.address();
    let (summary, signals) = (launched.summary, Signals::listen());
    let events = server.kv_events_place();
    let events = events.map_or(String::new(), |place| format!("events  {place}\n"));
    say(&format!(
        "{summary}{events}open    http://{address}/\n\ncurl http://{address}{example}\n\nCtrl-C stops it.\n"
    ));
    let mut is_told = false;
    let stop = async {
        told_to_stop(signals, config.shutdown_patience).await;
        is_told = true;
    };
    let drained = server.run(stop).await;
    if let Some(reason) = engine.failure() {
        return Err(format!(
            "the device has failed: {reason}; restart the server, and check the device if it fails again"
        )
        .into());
    }
    if !is_told {
        return Err(
            "the engine stopped because of a bug: restart the server and report the log".into()
        );
    }
    if drained.aborted > 0 || drained.abandoned_transfers > 0 {
        say(&format!(
            "stopped: {} requests were aborted, {} transfers were abandoned\n",
            drained.aborted, drained.abandoned_transfers
        ));
    } else {
        say("stopped\n");
    }
    Ok(String::new())
}

/// Shows how much of a download, or of the weights for a GPU, has arrived. A terminal shows a bar. Elsewhere, a line
/// tells that a download has begun.
#[derive(Default)]
struct StartBar {
    bar: Option<ProgressBar>,
    shows_weights: bool,
}

impl StartBar {
    fn show(&mut self, progress: Progress<'_>) {
        let (title, bytes, total_bytes, is_weights) = match progress {
            Progress::Download { model, bytes, total_bytes } => {
                (format!("downloading {model}"), bytes, total_bytes, false)
            }
            Progress::Weights { bytes, total_bytes } => {
                ("loading weights".to_owned(), bytes, total_bytes, true)
            }
        };
        if self.shows_weights != is_weights {
            self.end();
            self.shows_weights = is_weights;
        }
        let bar = self.bar.get_or_insert_with(|| {
            let bar =
                ProgressBar::with_draw_target(Some(total_bytes), ProgressDrawTarget::stderr());
            if bar.is_hidden() && !is_weights {
                say(&format!("{title}, {}\n", Size(total_bytes)));
            }
            bar.set_style(
                ProgressStyle::with_template(
                    "{msg} {bar:40} {binary_bytes} of {binary_total_bytes}, {eta} left",
                )
                .expect("the template is valid"),
            );
            bar.with_message(title)
        });
        bar.set_position(bytes);
    }

    fn end(&mut self) {
        if let Some(bar) = self.bar.take() {
            bar.finish_and_clear();
        }
    }
}

/// Writes to standard error. A failed write does not stop the server.
pub(crate) fn say(text: &str) {
    let _ = std::io::stderr().write_all(text.as_bytes());
}

/// A request that the server can answer, as the rest of a command.
fn example(model: &ServedModel, has_keys: bool) -> String {
    let key = if has_keys { "-H 'Authorization: Bearer KEY' " } else { "" };
    let (path, body) = if model.chat.exists() {
        let messages = json!([{ "role": "user", "content": "What is 20 + 22?" }]);
        (
            "/v1/chat/completions",
            json!({ "messages": messages, "max_tokens": 64, "temperature": 0 }),
        )
    } else {
        ("/v1/completions", json!({ "prompt": "What is 20 + 22?\n" }))
    };
    format!("{path} {key}\\\n  -H 'Content-Type: application/json' -d '{body}'")
}

/// Waits for a signal to end. Ctrl-C after that ends the program at once.
async fn told_to_stop(mut signals: Signals, patience: Duration) {
    signals.told_to_stop().await;
    let patience = humantime::format_duration(patience);
    say(&format!(
        "stopping: running requests have {patience} to finish; press Ctrl-C again to stop at once\n"
    ));
    tokio::spawn(async move {
        signals.told_again().await;
        std::process::exit(130);
    });
}

/// Warnings and errors. For L3, whose problems come and go, also the message that a problem is over.
const LOG_FILTER: &str = "warn,terrace_l3=info";

/// Returns whether log lines have colours: on a terminal, unless `NO_COLOR` is set.
fn uses_colours() -> bool {
    let is_forbidden = std::env::var_os("NO_COLOR").is_some_and(|value| !value.is_empty());
    std::io::stderr().is_terminal() && !is_forbidden
}

pub(crate) fn start_log(filter: Option<&str>) -> Result<(), Box<dyn Error>> {
    let filter: Targets = match filter {
        Some(filter) => {
            filter.parse().map_err(|error| format!("log (--log, TERRACE_LOG): {error}"))?
        }
        None => {
            let asked = std::env::var("RUST_LOG").ok().and_then(|filter| filter.parse().ok());
            asked.unwrap_or_else(|| LOG_FILTER.parse().expect("it is written as it should be"))
        }
    };
    // A message about a failed write would panic in the task that logs.
    let to_stderr = tracing_subscriber::fmt::layer()
        .with_writer(std::io::stderr)
        .with_ansi(uses_colours())
        .log_internal_errors(false);
    tracing_subscriber::registry().with(to_stderr).with(filter).init();
    Ok(())
}
