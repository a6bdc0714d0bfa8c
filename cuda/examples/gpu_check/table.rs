//! What was found, line by line.

use std::process::ExitCode;

/// What was found.
#[derive(Debug, Default)]
pub(crate) struct Table {
    wrong: usize,
}

impl Table {
    /// Something that must be so.
    pub(crate) fn check(&mut self, what: &str, found: &str, is_right: bool) {
        self.wrong += usize::from(!is_right);
        println!("{} {what:<58} {found}", if is_right { "ok   " } else { "WRONG" });
    }

    /// Something that did not come to an end.
    pub(crate) fn wrong(&mut self, what: &str, why: &str) {
        self.check(what, why, false);
    }

    /// Something that was measured, and what it should be.
    pub(crate) fn figure(&mut self, what: &str, found: &str, goal: &str, is_reached: bool) {
        let mark = if is_reached { "goal " } else { "below" };
        println!("{mark} {what:<58} {found:<24} {goal}");
    }

    /// Whether all was right.
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
