//! `terrace config`: checks the settings of a server and prints them, as a file that `terrace serve`
//! takes.

use std::error::Error;
use std::fmt::Display;
use std::path::{Path, PathBuf};

use terrace_server::{Config, NodeSettings, RouteSettings};

use crate::settings::{Given, tables, written};

/// Arguments of `terrace config`.
#[derive(clap::Args)]
pub(crate) struct Arguments {
    /// Settings in TOML; what is given here or by variables goes before them
    #[arg(env = "TERRACE_CONFIG")]
    file: Option<PathBuf>,
    /// Print JSON instead of TOML
    #[arg(long)]
    json: bool,
    /// Print docs/configuration.md
    #[arg(long, conflicts_with = "json")]
    markdown: bool,
    /// The settings of the scheduler alone, for programs that embed it
    #[arg(long, conflicts_with = "markdown")]
    scheduler: bool,
    #[command(flatten)]
    settings: Given<Config>,
}

const INTRODUCTION: &str = "Settings of `terrace serve`, which takes this file by --config. Each can also be \
    given by a flag or a variable, which go before the file: step_tokens by --step-tokens or \
    TERRACE_STEP_TOKENS. `terrace config FILE` checks a file and prints it like this.";

const PAGE: &str = "\
<!-- `terrace config --markdown > docs/configuration.md` writes this page anew. -->
# Settings

## Of a server

Everything can be set in three ways: by a flag of `terrace serve`, by an environment variable, and in a TOML
file that `--config FILE` or `TERRACE_CONFIG` names. Flags go before variables, and those before the file. The
variable of a setting is `TERRACE_` and the setting's name in capitals: `--step-tokens 256`,
`TERRACE_STEP_TOKENS=256` and, in the file, `step_tokens = 256` are the same. Only the keys of tenants are in
`TERRACE_API_KEYS`.

```sh
terrace config > terrace.toml            # every setting, with its description and its default
terrace config terrace.toml              # checks a file, and prints it with everything filled in
terrace serve --config terrace.toml
terrace serve --print-config --l3 none   # what would be served with, as such a file; without keys
```

Sizes are written like `512MiB`, `1.5GiB` or `4GB`, times like `10s` or `2m 30s`. In the names of policies,
`-` and `_` are the same.
";

const PAGE_OF_ROUTERS: &str = "
## Of a router

Flags of `terrace route`, variables, and a file that `--config FILE` or `TERRACE_ROUTE_CONFIG` names. Variables
begin with `TERRACE_ROUTE_`, but for `TERRACE_API_KEYS`, `TERRACE_SHUTDOWN_PATIENCE` and `TERRACE_LOG`, which servers
have too. [Routing](routing.md) says more.
";

const PAGE_OF_NODES: &str = "
## Of a node

Flags of `terrace node`, variables, and a file that `--config FILE` or `TERRACE_NODE_CONFIG` names. Variables
begin with `TERRACE_NODE_`, but for `TERRACE_SHUTDOWN_PATIENCE` and `TERRACE_LOG`, which servers have too.
[Nodes](nodes.md) says more.
";

pub(crate) fn run(arguments: &Arguments) -> Result<String, Box<dyn Error>> {
    let file = arguments.file.as_deref();
    if arguments.markdown {
        let (server, node) = (tables::<Config>(), tables::<NodeSettings>());
        let router = tables::<RouteSettings>();
        return Ok(format!("{PAGE}{server}{PAGE_OF_NODES}{node}{PAGE_OF_ROUTERS}{router}"));
    }
    if arguments.scheduler {
        return scheduler(file, arguments.json);
    }
    let config = resolve(&arguments.settings, file)?;
    if !arguments.json {
        return Ok(print(&config));
    }
    let shown = Config { keys: Vec::new(), operator_key: None, ..config };
    Ok(serde_json::to_string_pretty(&shown)? + "\n")
}

/// The server's configuration from a file, and before it what was given by flags and variables.
pub(crate) fn resolve(
    given: &Given<Config>,
    file: Option<&Path>,
) -> Result<Config, Box<dyn Error>> {
    let mut resolved = given.over(file)?;
    if resolved.is_default("limits.bodies_max") {
        let limits = &mut resolved.config.limits;
        limits.bodies_max = limits.bodies_max.max(limits.body_max);
    }
    match resolved.config.check() {
        Ok(()) => Ok(resolved.config),
        Err(error) => Err(resolved.complaint(error.setting, &error.value, &error.advice).into()),
    }
}

/// A configuration as a file, without keys.
pub(crate) fn print(config: &Config) -> String {
    written(INTRODUCTION, config)
}

fn scheduler(file: Option<&Path>, json: bool) -> Result<String, Box<dyn Error>> {
    let config = match file {
        Some(file) => {
            let named = |error: &dyn Display| format!("{}: {error}", file.display());
            let text = std::fs::read_to_string(file).map_err(|error| named(&error))?;
            let config: terrace_scheduler::Config =
                toml::from_str(&text).map_err(|error| named(&error))?;
            config.check().map_err(|error| named(&error))?;
            config
        }
        None => terrace_scheduler::Config::default(),
    };
    Ok(if json { serde_json::to_string_pretty(&config)? + "\n" } else { toml::to_string(&config)? })
}
