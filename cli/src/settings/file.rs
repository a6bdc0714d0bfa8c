//! Settings in files: TOML with a comment for each of them.

use std::collections::BTreeMap;
use std::fmt::Display;
use std::path::Path;

use serde::de::DeserializeOwned;
use terrace_server::{Configuration, Form, Setting};
use toml::de::DeTable;

use super::Origin;

/// Columns of a line of comments.
const WIDTH: usize = 100;

/// Reads a file, and the line of each setting in it.
pub(super) fn read<C: DeserializeOwned>(
    file: &Path,
) -> Result<(C, BTreeMap<String, Origin>), String> {
    let named = |error: &dyn Display| format!("{}: {error}", file.display());
    let text = std::fs::read_to_string(file).map_err(|error| named(&error))?;
    let config = toml::from_str(&text).map_err(|error| named(&error))?;
    let name = file.display().to_string();
    let lines = lines(&text).map_err(|error| named(&error))?;
    let origin = |line| Origin::File { name: name.clone(), line };
    Ok((config, lines.into_iter().map(|(path, line)| (path, origin(line))).collect()))
}

/// The lines of all settings, those of tables included.
fn lines(text: &str) -> Result<Vec<(String, usize)>, toml::de::Error> {
    let line = |start: usize| text[..start].matches('\n').count() + 1;
    let mut lines = Vec::new();
    for (key, value) in DeTable::parse(text)?.get_ref() {
        lines.push((key.get_ref().to_string(), line(key.span().start)));
        for (inner, _) in value.get_ref().as_table().into_iter().flatten() {
            let path = format!("{}.{}", key.get_ref(), inner.get_ref());
            lines.push((path, line(inner.span().start)));
        }
    }
    Ok(lines)
}

/// A file that says the same. Secrets are not in it.
pub(crate) fn written<C: Configuration + Default>(introduction: &str, config: &C) -> String {
    let mut text = comment(introduction);
    let (mut heading, mut table) = ("", None);
    for setting in C::SETTINGS {
        if setting.heading != heading {
            heading = setting.heading;
            text += &format!("\n\n# {heading}\n");
        }
        if setting.table != table {
            table = setting.table;
            text += &table.map(|table| format!("\n[{table}]\n")).unwrap_or_default();
        }
        text += "\n";
        text += &entry(setting, config);
    }
    text
}

fn entry<C: Configuration + Default>(setting: &Setting<C>, config: &C) -> String {
    let name = setting.name;
    let mut description = setting.description();
    if let Some(default) = setting.default_in_words {
        description += &format!(" [default: {default}]");
    }
    let mut description = comment(&description);
    let value = setting.get(config);
    if setting.is_secret && value.is_some() {
        description += &comment("A value is set but not printed: set it again.");
    }
    let quoted = |value: &str| toml::Value::from(value).to_string();
    match (value, setting.form) {
        (Some(value), Form::Text) if !setting.is_secret => {
            format!("{description}{name} = {}\n", quoted(&value))
        }
        (Some(value), Form::Number | Form::Switch) if !setting.is_secret => {
            format!("{description}{name} = {value}\n")
        }
        (_, form) => {
            let example = match (setting.example, form) {
                (Some(example), _) => example.to_owned(),
                (None, Form::Text) => quoted(setting.value_name),
                (None, Form::Number | Form::Switch | Form::List | Form::Tables) => {
                    setting.value_name.to_owned()
                }
            };
            format!("{description}# {name} = {example}\n")
        }
    }
}

fn comment(text: &str) -> String {
    let mut lines = String::new();
    let mut line = String::from("#");
    for word in text.split_whitespace() {
        if line.len() + 1 + word.len() > WIDTH {
            lines += &line;
            lines += "\n";
            line = String::from("#");
        }
        line += " ";
        line += word;
    }
    lines + &line + "\n"
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_lines_of_settings_are_found_in_every_way_of_writing_them() {
        let text = "a = 1\n\n[limits]\nb = 2\n\n[[keys]]\nname = 'x'\n";
        let found = lines(text).unwrap();
        let line = |path: &str| found.iter().find(|(name, _)| name == path).map(|(_, line)| *line);
        assert_eq!((line("a"), line("limits.b"), line("keys")), (Some(1), Some(4), Some(6)));
        let found = lines("limits.b = 1\nlimits.c = 2").unwrap();
        assert!(found.contains(&("limits.c".to_owned(), 2)), "{found:?}");
    }

    #[test]
    fn comments_are_not_wider_than_they_may_be() {
        let lines = comment(&"word ".repeat(100));
        assert!(lines.lines().all(|line| line.len() <= WIDTH && line.starts_with("# word")));
        assert_eq!(lines.matches("word").count(), 100);
    }
}
