//! `terrace route`: sends requests to the servers that hold their prefixes.

use std::error::Error;
use std::path::PathBuf;
use std::time::Duration;

use terrace_server::{RouteSettings, RouterServer};

use crate::serve::{say, start_log};
use crate::settings::Given;
use crate::signals::Signals;

const EXAMPLES: &str = "\
Examples:
  terrace serve --listen 127.0.0.1:8001 --kv-events tcp://127.0.0.1:5557 --kv-events-replay tcp://127.0.0.1:5558
      A server that publishes KV events and replays missed ones
  terrace route --worker http://127.0.0.1:8001+tcp://127.0.0.1:5557+tcp://127.0.0.1:5558 \\
      --worker http://127.0.0.1:8002+tcp://127.0.0.1:5567+tcp://127.0.0.1:5568
      A router in front of two such servers
  terrace route --model ./Llama-3.1-8B-Instruct --worker http://10.0.0.1:8000+tcp://10.0.0.1:5557
      A router in front of a vLLM server, with the tokenizer of its model

All settings can also be in the file. Names there have _ instead of -, and workers are tables [[workers]]
with url, events and replay. Ctrl-C, SIGTERM and SIGHUP stop the router after running requests have finished.";

/// Arguments of `terrace route`.
#[derive(clap::Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct Arguments {
    /// TOML file with settings; flags and environment variables override it
    #[arg(long, value_name = "FILE", env = "TERRACE_ROUTE_CONFIG")]
    config: Option<PathBuf>,
    #[command(flatten)]
    settings: Given<RouteSettings>,
}

pub(crate) fn run(arguments: &Arguments) -> Result<String, Box<dyn Error>> {
    let resolved = arguments.settings.over(arguments.config.as_deref())?;
    if let Err(error) = resolved.config.check() {
        return Err(resolved.complaint(error.setting, &error.value, &error.advice).into());
    }
    let settings = resolved.config;
    start_log(settings.log.as_deref())?;
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .thread_name("terrace-route")
        .enable_all()
        .build()?;
    let routed = runtime.block_on(route(&settings));
    runtime.shutdown_timeout(Duration::from_secs(1));
    routed
}

async fn route(settings: &RouteSettings) -> Result<String, Box<dyn Error>> {
    let router = RouterServer::bind(settings).await?;
    let mut told = String::new();
    for ((url, is_up), place) in router.workers().into_iter().zip(&settings.workers) {
        let state = if is_up { "answers" } else { "does not answer yet" };
        let events = match (&place.events, &place.replay) {
            (Some(events), Some(_)) => format!("events from {events}, with replay"),
            (Some(events), None) => format!("events from {events}"),
            (None, _) => "no events: routed by load only".to_owned(),
        };
        // It must not look like the address of this program.
        told += &format!("worker  {}, {state}; {events}\n", url.trim_start_matches("http://"));
    }
    let mut signals = Signals::listen();
    say(&format!("{told}open    http://{}/\n\nCtrl-C stops it.\n", router.address()));
    let patience = humantime::format_duration(settings.shutdown_patience);
    let cut_short = router
        .run(async {
            signals.told_to_stop().await;
            say(&format!(
                "stopping: running requests have {patience} to finish; press Ctrl-C again to stop at \
                 once\n"
            ));
            tokio::spawn(async move {
                signals.told_again().await;
                std::process::exit(130);
            });
        })
        .await;
    match cut_short {
        0 => say("stopped\n"),
        cut_short => say(&format!("stopped: {cut_short} requests were aborted\n")),
    }
    Ok(String::new())
}
