//! Environment variables that look like settings of the program.

use std::collections::BTreeSet;

use clap::Command;

/// Variables that are read by libraries, not as arguments.
const OTHERS: [&str; 1] = ["TERRACE_NVRTC"];

/// Returns a warning for each of `names` that begins with `TERRACE_` and that no command of `program` reads.
pub(crate) fn unknown(program: &Command, names: impl Iterator<Item = String>) -> Vec<String> {
    let mut known: BTreeSet<String> = OTHERS.map(str::to_owned).into();
    collect(program, &mut known);
    let mut warnings: Vec<String> = names
        .filter(|name| name.starts_with("TERRACE_") && !known.contains(name))
        .map(|name| {
            let similarity = |known: &&String| strsim::osa_distance(known, &name);
            let hint = match known.iter().min_by_key(similarity) {
                Some(closest) if strsim::osa_distance(closest, &name) <= 3 => {
                    format!(": did you mean {closest}?")
                }
                Some(_) | None => String::new(),
            };
            format!("the environment variable {name} is unknown and has no effect{hint}")
        })
        .collect();
    warnings.sort();
    warnings
}

fn collect(command: &Command, known: &mut BTreeSet<String>) {
    let variables = command.get_arguments().filter_map(|argument| argument.get_env());
    known.extend(variables.map(|variable| variable.to_string_lossy().into_owned()));
    for command in command.get_subcommands() {
        collect(command, known);
    }
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    use super::*;

    #[test]
    fn an_unknown_variable_is_named_together_with_the_closest_known_one() {
        let warnings = |names: &[&str]| {
            let names = names.iter().map(|name| (*name).to_owned());
            unknown(&crate::Arguments::command(), names)
        };
        let known =
            ["TERRACE_LISTEN", "TERRACE_CONFIG", "TERRACE_NODE_CONFIG", "TERRACE_NVRTC", "HOME"];
        assert_eq!(warnings(&known), [""; 0]);
        let warned = warnings(&["TERRACE_HOST_MEMROY", "TERRACE_WEATHER"]);
        assert!(warned[0].ends_with("did you mean TERRACE_HOST_MEMORY?"), "{warned:?}");
        assert!(warned[1].ends_with("TERRACE_WEATHER is unknown and has no effect"), "{warned:?}");
    }
}
