//! `terrace config`: checks a configuration and prints it with every default filled in.

use std::error::Error;
use std::path::PathBuf;

use terrace_scheduler::Config;

/// Arguments of `terrace config`.
#[derive(clap::Args)]
pub(crate) struct Arguments {
    /// A configuration in TOML; without it, the default
    file: Option<PathBuf>,
    /// Print JSON instead of TOML
    #[arg(long)]
    json: bool,
}

pub(crate) fn run(arguments: &Arguments) -> Result<String, Box<dyn Error>> {
    let config = match &arguments.file {
        Some(file) => {
            let named = |error: &dyn std::fmt::Display| format!("{}: {error}", file.display());
            let text = std::fs::read_to_string(file).map_err(|error| named(&error))?;
            let config: Config = toml::from_str(&text).map_err(|error| named(&error))?;
            config.check().map_err(|error| named(&error))?;
            config
        }
        None => Config::default(),
    };
    Ok(if arguments.json {
        serde_json::to_string_pretty(&config)? + "\n"
    } else {
        toml::to_string(&config)?
    })
}
