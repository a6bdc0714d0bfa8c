//! Settings as a page of the documents.

use terrace_server::{Configuration, Setting};

/// A table for each heading, in Markdown.
pub(crate) fn tables<C: Configuration + Default>() -> String {
    let mut text = String::new();
    let mut heading = "";
    for setting in C::SETTINGS {
        if setting.heading != heading {
            heading = setting.heading;
            text += &format!("\n## {heading}\n\n");
            text += "| flag | in the file | default | what it is |\n|---|---|---|---|\n";
        }
        text += &row(setting);
    }
    text
}

fn row<C: Configuration + Default>(setting: &Setting<C>) -> String {
    let (flag, path) = (setting.flag(), setting.path());
    let default = match (setting.default_in_words, setting.default()) {
        (Some(words), _) => words.to_owned(),
        (None, Some(value)) => format!("`{value}`"),
        (None, None) => String::new(),
    };
    let (value_name, description) = (setting.value_name, setting.description());
    let row = [format!("`--{flag} {value_name}`"), format!("`{path}`"), default, description];
    // A bar would end the cell.
    let cells = row.map(|cell| cell.replace('|', "\\|"));
    format!("| {} |\n", cells.join(" | "))
}
