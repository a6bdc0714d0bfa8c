//! What was started, for the person who started it.

use std::fmt;

use terrace_replay::human::whole;

use crate::recordings::Recording;
use terrace_replay::Size;

/// What an engine has to work with.
#[derive(Clone, Debug)]
pub struct Summary {
    pub(crate) name: String,
    /// What is to be said about a model that comes with the program.
    pub(crate) about: Option<&'static str>,
    /// Where it computes: so many threads, or a GPU.
    pub(crate) place: String,
    /// What is to be said about the GPU, a line each.
    pub(crate) gpu: Vec<String>,
    pub(crate) tokens_max: u32,
    pub(crate) kv_bytes_per_token: u64,
    pub(crate) device: Tier,
    pub(crate) host: Option<Tier>,
    pub(crate) l3: Option<Tier>,
    pub(crate) recordings: Vec<Recording>,
}

/// A tier's size.
#[derive(Clone, Debug)]
pub(crate) struct Tier {
    pub(crate) size: Size,
    pub(crate) tokens: u64,
    /// What it holds already.
    pub(crate) warm_tokens: u64,
    /// Where it is, if not in this process.
    pub(crate) place: Option<String>,
    /// What else there is to say, a line each.
    pub(crate) notes: Vec<String>,
}

impl fmt::Display for Summary {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let kv = Size(self.kv_bytes_per_token);
        let about = self.about.map_or(String::new(), |about| format!(", {about}"));
        writeln!(f, "model   {}{about}", self.name)?;
        writeln!(
            f,
            "        sequences of up to {} tokens, {kv} of KV per token, on {}",
            whole(self.tokens_max.into()),
            self.place
        )?;
        for (line, note) in self.gpu.iter().enumerate() {
            let name = if line == 0 { "gpu" } else { "" };
            writeln!(f, "{name:6}  {note}")?;
        }
        writeln!(f, "device  {}", self.device)?;
        for (name, tier) in [("host", &self.host), ("l3", &self.l3)] {
            match tier {
                Some(tier) => writeln!(f, "{name:6}  {tier}")?,
                None => writeln!(f, "{name:6}  none")?,
            }
            for note in tier.iter().flat_map(|tier| &tier.notes) {
                writeln!(f, "        {note}")?;
            }
        }
        for Recording { what, file, is_renamed } in &self.recordings {
            let why = if *is_renamed { ", because the other name exists" } else { "" };
            writeln!(f, "record  {what} to {}{why}", file.display())?;
        }
        Ok(())
    }
}

impl fmt::Display for Tier {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let size = self.size;
        write!(f, "{size}, room for {} tokens", whole(self.tokens))?;
        if let Some(place) = &self.place {
            write!(f, ", in {place}")?;
        }
        if self.warm_tokens > 0 {
            write!(f, ", {} of them warm", whole(self.warm_tokens))?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_gpu_has_lines_of_its_own_where_there_is_one() {
        let size = Size::mib(64);
        let tier = Tier { size, tokens: 1024, warm_tokens: 0, place: None, notes: Vec::new() };
        let mut summary = Summary {
            name: "m".to_owned(),
            about: None,
            place: "2 threads".to_owned(),
            gpu: Vec::new(),
            tokens_max: 1024,
            kv_bytes_per_token: 65_536,
            device: tier,
            host: None,
            l3: None,
            recordings: Vec::new(),
        };
        assert!(!summary.to_string().contains("gpu"), "{summary}");
        summary.gpu = vec!["A GPU".to_owned(), "and how it copies".to_owned()];
        let text = summary.to_string();
        let lines: Vec<_> = text.lines().skip(2).take(3).collect();
        let device = "device  64.0 MiB, room for 1,024 tokens";
        assert_eq!(lines, ["gpu     A GPU", "        and how it copies", device]);
    }

    #[test]
    fn numbers_are_grouped_by_thousands() {
        let text = [0, 999, 1_000, 1_234_567].map(whole);
        assert_eq!(text, ["0", "999", "1,000", "1,234,567"]);
    }
}
