//! Lists of actions as files: a configuration, then one action per line.

use terrace_scheduler::Config;

use super::action::Action;

/// Formats a list of actions.
///
/// # Panics
/// Never: all values are plain data.
#[must_use]
pub fn write_story(config: &Config, actions: &[Action]) -> String {
    let config = serde_json::to_string(config).expect("plain data");
    let actions = actions.iter().map(|action| format!("{action}\n"));
    format!("{config}\n{}", actions.collect::<String>())
}

/// Parses a list of actions.
///
/// # Errors
/// Returns the invalid line.
pub fn read_story(text: &str) -> Result<(Config, Vec<Action>), String> {
    let mut lines = text.lines().filter(|line| !line.is_empty() && !line.starts_with('#'));
    let first = lines.next().ok_or("an empty story")?;
    let config = serde_json::from_str(first).map_err(|error| format!("{first}: {error}"))?;
    let actions = lines
        .map(|line| line.parse().map_err(|error| format!("{line}: {error}")))
        .collect::<Result<_, _>>()?;
    Ok((config, actions))
}
