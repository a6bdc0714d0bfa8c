//! The table of results.

use std::process::ExitCode;

/// Results so far.
#[derive(Debug, Default)]
pub(crate) struct Table {
    wrong: usize,
}

impl Table {
    /// Adds the result of a check.
    pub(crate) fn check(&mut self, what: &str, found: &str, is_right: bool) {
        self.wrong += usize::from(!is_right);
        println!("{} {what:<58} {found}", if is_right { "ok   " } else { "WRONG" });
    }

    /// Adds a check that ended with an error.
    pub(crate) fn wrong(&mut self, what: &str, why: &str) {
        self.check(what, why, false);
    }

    /// Adds a measured figure and its goal.
    pub(crate) fn figure(&mut self, what: &str, found: &str, goal: &str, is_reached: bool) {
        let mark = if is_reached { "goal " } else { "below" };
        println!("{mark} {what:<58} {found:<24} {goal}");
    }

    /// Returns the exit code.
    pub(crate) fn end(self) -> ExitCode {
        match self.wrong {
            0 => ExitCode::SUCCESS,
            wrong => {
                println!("{wrong} wrong");
                ExitCode::FAILURE
            }
        }
    }
}
