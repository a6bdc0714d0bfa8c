//! Short stories as files: a configuration, then one action a line.

use terrace_scheduler::Config;

use super::action::Action;

/// The text of a story.
///
/// # Panics
/// Never: what is written is plain data.
#[must_use]
pub fn write_story(config: &Config, actions: &[Action]) -> String {
    let config = serde_json::to_string(config).expect("plain data");
    let actions = actions.iter().map(|action| format!("{action}\n"));
    format!("{config}\n{}", actions.collect::<String>())
}

/// The story of a text.
///
/// # Errors
/// The line that is not understood.
pub fn read_story(text: &str) -> Result<(Config, Vec<Action>), String> {
    let mut lines = text.lines().filter(|line| !line.is_empty() && !line.starts_with('#'));
    let first = lines.next().ok_or("an empty story")?;
    let config = serde_json::from_str(first).map_err(|error| format!("{first}: {error}"))?;
    let actions = lines
        .map(|line| line.parse().map_err(|error| format!("{line}: {error}")))
        .collect::<Result<_, _>>()?;
    Ok((config, actions))
}
