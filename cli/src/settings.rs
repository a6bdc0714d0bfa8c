//! Settings as flags and variables, over those of a file, and where each came from.

mod file;
mod page;
mod variables;

use std::collections::BTreeMap;
use std::error::Error;
use std::path::Path;

use clap::parser::ValueSource;
use clap::{Arg, ArgAction, ArgMatches, Args, Command, FromArgMatches};
use serde::de::DeserializeOwned;
use terrace_server::{Config, Configuration, Form, Setting};

pub(crate) use file::written;
pub(crate) use page::tables;
pub(crate) use variables::unknown as unknown_variables;

/// Values given by flags and environment variables.
pub(crate) struct Given<C: Configuration>(Vec<(&'static Setting<C>, Origin, String)>);

/// Source of a setting's value.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Origin {
    /// No value was given.
    Default,
    /// A line of the file.
    File {
        /// The file, as the user named it.
        name: String,
        /// From 1.
        line: usize,
    },
    /// An environment variable.
    Variable,
    /// A flag.
    Flag,
}

/// The configuration that results.
pub(crate) struct Resolved<C> {
    pub(crate) config: C,
    origins: BTreeMap<String, Origin>,
}

impl<C: Configuration + Default + DeserializeOwned> Given<C> {
    /// The file's settings, and before them what is given here.
    pub(crate) fn over(&self, file: Option<&Path>) -> Result<Resolved<C>, Box<dyn Error>> {
        let (mut config, mut origins) = match file {
            Some(file) => file::read(file)?,
            None => (C::default(), BTreeMap::new()),
        };
        for (setting, origin, value) in &self.0 {
            let told = || origin.tell(setting, (!setting.is_secret).then_some(value));
            setting.set(&mut config, value).map_err(|advice| format!("{}: {advice}", told()))?;
            origins.insert(setting.path(), origin.clone());
        }
        Ok(Resolved { config, origins })
    }
}

impl<C: Configuration> Resolved<C> {
    /// Returns whether no value was given for the setting.
    pub(crate) fn is_default(&self, path: &str) -> bool {
        !self.origins.contains_key(path)
    }

    /// Describes a problem with a setting, by the name under which the user gave it.
    pub(crate) fn complaint(&self, path: &str, value: &str, advice: &str) -> String {
        match C::setting(path) {
            Some(setting) => {
                let origin = self.origins.get(path).unwrap_or(&Origin::Default);
                format!("{}: {advice}", origin.tell(setting, Some(value)))
            }
            None => format!("{path} = {value}: {advice}"),
        }
    }
}

impl Origin {
    /// A setting and its value, as they were given.
    fn tell<C: Configuration>(
        &self,
        setting: &Setting<C>,
        value: Option<impl AsRef<str>>,
    ) -> String {
        let after = |sign: &str| {
            let value = value.as_ref().map(|value| format!("{sign}{}", value.as_ref()));
            value.unwrap_or_default()
        };
        let (path, flag, variable) = (setting.path(), setting.flag(), setting.variable());
        match self {
            Self::Default => format!("{path}{} (--{flag}, {variable})", after(" = ")),
            Self::File { name, line } => format!("{name}, line {line}: {path}{}", after(" = ")),
            Self::Variable => format!("{variable}{}", after("=")),
            Self::Flag => format!("--{flag}{}", after(" ")),
        }
    }
}

/// Settings of clusters and nodes, for commands that need no other settings of a server.
pub(crate) struct GivenClusters(Given<Config>);

impl GivenClusters {
    /// A server's settings with nothing but what a file and, before it, flags and variables say of
    /// clusters and nodes.
    pub(crate) fn over(&self, file: Option<&Path>) -> Result<Config, Box<dyn Error>> {
        let resolved = self.0.over(file)?;
        match resolved.config.check_clusters() {
            Ok(()) => Ok(resolved.config),
            Err(error) => {
                Err(resolved.complaint(error.setting, &error.value, &error.advice).into())
            }
        }
    }
}

impl Args for GivenClusters {
    fn augment_args(command: Command) -> Command {
        command.args(clusters().map(|setting| argument(setting).help_heading("Clusters and nodes")))
    }

    fn augment_args_for_update(command: Command) -> Command {
        Self::augment_args(command)
    }
}

impl FromArgMatches for GivenClusters {
    fn from_arg_matches(matches: &ArgMatches) -> Result<Self, clap::Error> {
        Ok(Self(given(matches, clusters())))
    }

    fn update_from_arg_matches(&mut self, matches: &ArgMatches) -> Result<(), clap::Error> {
        *self = Self::from_arg_matches(matches)?;
        Ok(())
    }
}

/// The settings about clusters and nodes.
fn clusters() -> impl Iterator<Item = &'static Setting<Config>> {
    let is_one = |name: &str| name.starts_with("mooncake_") || name.starts_with("node_");
    flags::<Config>().filter(move |setting| is_one(setting.name))
}

impl<C: Configuration + Default> Args for Given<C> {
    fn augment_args(command: Command) -> Command {
        command.args(flags::<C>().map(argument))
    }

    fn augment_args_for_update(command: Command) -> Command {
        Self::augment_args(command)
    }
}

impl<C: Configuration> FromArgMatches for Given<C> {
    fn from_arg_matches(matches: &ArgMatches) -> Result<Self, clap::Error> {
        Ok(given(matches, flags()))
    }

    fn update_from_arg_matches(&mut self, matches: &ArgMatches) -> Result<(), clap::Error> {
        *self = Self::from_arg_matches(matches)?;
        Ok(())
    }
}

/// Returns the settings that were given, with their sources.
fn given<C: Configuration>(
    matches: &ArgMatches,
    settings: impl Iterator<Item = &'static Setting<C>>,
) -> Given<C> {
    let mut given = Vec::new();
    for setting in settings {
        let flag = setting.flag();
        let origin = match matches.value_source(&flag) {
            Some(ValueSource::CommandLine) => Origin::Flag,
            Some(ValueSource::EnvVariable) => Origin::Variable,
            Some(_) | None => continue,
        };
        let values = matches.get_many::<String>(&flag).into_iter().flatten();
        let values: Vec<_> = values.map(String::as_str).collect();
        given.push((setting, origin, values.join(",")));
    }
    Given(given)
}

/// The settings that have flags.
fn flags<C: Configuration>() -> impl Iterator<Item = &'static Setting<C>> {
    C::SETTINGS.iter().filter(|setting| setting.form != Form::Tables)
}

fn argument<C: Configuration + Default>(setting: &Setting<C>) -> Arg {
    let default = setting.default().map(|default| format!(" [default: {default}]"));
    let default = default.unwrap_or_default();
    let help = |text: String| format!("{}{default}", text.trim_end_matches('.'));
    // Where no setting is common, there are few, and the short help shows all.
    let has_common = C::SETTINGS.iter().any(|setting| setting.is_common);
    let argument = Arg::new(setting.flag())
        .long(setting.flag())
        .env(setting.variable())
        .hide_env_values(setting.is_secret)
        .value_name(setting.value_name)
        .help_heading(setting.heading)
        .hide_short_help(has_common && !setting.is_common)
        .help(help(setting.summary()))
        .long_help(help(setting.description()));
    match setting.form {
        Form::Text | Form::Number | Form::Tables => argument.action(ArgAction::Set),
        Form::List => argument.action(ArgAction::Append),
        Form::Switch => argument.num_args(0..=1).require_equals(true).default_missing_value("true"),
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use clap::Parser;
    use terrace_cache::{EvictionKind, WritePolicy};
    use terrace_server::{L3Choice, Secret, Size};

    use super::*;

    #[derive(Parser)]
    struct Line {
        #[command(flatten)]
        given: Given<Config>,
    }

    fn resolved(file: Option<&str>, line: &[&str]) -> Result<Resolved<Config>, String> {
        let line = [&["serve"], line].concat();
        let given = Line::try_parse_from(line).map_err(|error| error.to_string())?.given;
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("terrace.toml");
        std::fs::write(&path, file.unwrap_or_default()).unwrap();
        given.over(file.map(|_| &*path)).map_err(|error| error.to_string())
    }

    fn config(file: Option<&str>, line: &[&str]) -> Config {
        resolved(file, line).unwrap_or_else(|error| panic!("{error}")).config
    }

    fn error(file: Option<&str>, line: &[&str]) -> String {
        resolved(file, line).err().expect("it cannot work")
    }

    #[test]
    fn without_arguments_everything_is_as_the_server_has_it() {
        assert_eq!(config(None, &[]), Config::default());
        assert_eq!(config(Some(""), &[]), Config::default());
    }

    #[test]
    fn arguments_go_before_the_file() {
        let file = "page_size = 32\nstep_tokens = 128\n[limits]\nwrite_timeout = \"5s\"\n";
        let config = config(Some(file), &["--step-tokens", "256", "--eviction", "s3_fifo"]);
        assert_eq!((config.page_size, config.step_tokens), (32, Some(256)));
        assert_eq!(config.eviction, EvictionKind::S3Fifo);
        assert_eq!(config.limits.write_timeout, Duration::from_secs(5));
    }

    #[test]
    fn sizes_times_and_keys_are_read_as_people_write_them() {
        let config = config(
            None,
            &[
                "--device-memory=64MiB",
                "--l3=memory:1GiB",
                "--shutdown-patience=1m",
                "--api-key=alice=a",
                "--api-key=bob=b=c",
                "--write-policy=selective_write_through:2",
            ],
        );
        assert_eq!(config.device_memory, Some(Size::mib(64)));
        assert_eq!(config.l3, Some(L3Choice::Memory(Size::gib(1))));
        assert_eq!(config.shutdown_patience, Duration::from_secs(60));
        assert_eq!(config.keys[1].key, Secret::from("b=c"));
        assert_eq!(config.write_policy, WritePolicy::SelectiveWriteThrough { hits: 2 });
    }

    #[test]
    fn every_setting_has_a_flag_and_is_written_as_it_is_read() {
        let mut config = config(
            None,
            &["--model", "a \"folder\"", "--l3-capacity=12345", "--bodies-max=128MiB", "--n-max=3"],
        );
        let text = written("A file.", &config);
        assert_eq!(self::config(Some(&text), &[]), config, "{text}");
        assert!(text.contains("l3_capacity = \"12345B\"") && text.contains("# log = "), "{text}");
        config.operator_key = Some(Secret::from("hush"));
        config.keys = vec!["alice=hush".parse().unwrap()];
        assert!(!written("A file.", &config).contains("hush"));
    }

    #[test]
    fn whoever_gave_what_cannot_be_read_is_told_so() {
        let cases = [
            (error(None, &["--page-size", "x"]), "--page-size x: write a whole number"),
            (error(None, &["--device-memory", "x"]), "--device-memory x: \"x\" is not a size"),
            (error(None, &["--eviction", "x"]), "--eviction x: use lru"),
            (error(None, &["--api-key", "hush"]), "--api-key: write it as NAME=KEY"),
        ];
        for (said, expected) in cases {
            assert!(said.starts_with(expected), "{said}");
        }
        for (file, line) in [("\npage_size = \"x\"", "line 2"), ("[limits]\nn_mx = 1", "n_mx")] {
            let said = error(Some(file), &[]);
            assert!(said.contains("terrace.toml") && said.contains(line), "{said}");
        }
    }

    #[test]
    fn whoever_gave_what_cannot_work_is_told_so() {
        let file = "# A comment.\nstep_tokens = 8\n[limits]\nn_max = 0";
        let from_file = resolved(Some(file), &[]).unwrap_or_else(|error| panic!("{error}"));
        let said = from_file.complaint("step_tokens", "8", "raise it");
        assert!(said.ends_with("terrace.toml, line 2: step_tokens = 8: raise it"), "{said}");
        let said = from_file.complaint("limits.n_max", "0", "raise it");
        assert!(said.ends_with("terrace.toml, line 4: limits.n_max = 0: raise it"), "{said}");
        let by_flag = resolved(Some(file), &["--step-tokens", "8"]);
        let by_flag = by_flag.unwrap_or_else(|error| panic!("{error}"));
        let said = by_flag.complaint("step_tokens", "8", "raise it");
        assert_eq!(said, "--step-tokens 8: raise it");
        let said = by_flag.complaint("running_max", "64", "lower it");
        assert_eq!(said, "running_max = 64 (--running-max, TERRACE_RUNNING_MAX): lower it");
    }
}
