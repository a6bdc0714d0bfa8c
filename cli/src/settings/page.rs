//! Settings as a page of the documents.

use terrace_server::{Configuration, Form, Setting};

/// A table for each heading, in Markdown.
pub(crate) fn tables<C: Configuration + Default>() -> String {
    let mut text = String::new();
    let mut heading = "";
    for setting in C::SETTINGS {
        if setting.heading != heading {
            heading = setting.heading;
            text += &format!("\n### {heading}\n\n");
            text += "| flag | name in the file | default | description |\n|---|---|---|---|\n";
        }
        text += &row(setting);
    }
    text
}

fn row<C: Configuration + Default>(setting: &Setting<C>) -> String {
    let flag = match setting.form {
        Form::Text | Form::Number | Form::List => {
            format!("`--{} {}`", setting.flag(), setting.value_name)
        }
        Form::Switch => format!("`--{}`", setting.flag()),
        Form::Tables => String::new(),
    };
    let default = match (setting.default_in_words, setting.default()) {
        (Some(words), _) => words.to_owned(),
        (None, Some(value)) => format!("`{value}`"),
        (None, None) => String::new(),
    };
    let row = [flag, format!("`{}`", setting.path()), default, setting.description()];
    // A bar would end the cell.
    let cells = row.map(|cell| cell.replace('|', "\\|"));
    format!("| {} |\n", cells.join(" | "))
}
