//! Runs: consecutive whole pages of a sequence.

use std::ops::Range;
use std::sync::Arc;

use crate::in_parts::{Keys, Tokens};
use crate::key::{PageKey, Token};
use crate::reach::Reach;
use crate::text::{Part, Text};

/// Consecutive whole pages of a sequence: what an insertion into the tree is about.
#[derive(Clone, Copy, Debug)]
pub struct PageRun<'a> {
    /// The first page's place in its sequence.
    pub start_page: u32,
    page_size: usize,
    /// Deepest tier that it may be written to.
    pub(crate) reach: Reach,
    /// The prompt that `front` is part of, and the place of its first page there.
    prompt: Option<(&'a Arc<Text>, usize)>,
    front: Part<'a>,
    back: Part<'a>,
}

/// Consecutive whole pages that outlive their sequence: what a transfer is about. Those of the prompt
/// are shared with it.
#[derive(Clone, Debug)]
pub struct KeptRun {
    /// The prompt, and which pages of it.
    prompt: Option<(Arc<Text>, Range<usize>)>,
    /// The pages that follow.
    back: Text,
}

impl<'a> PageRun<'a> {
    /// Pages with these keys and tokens that are part of no sequence.
    ///
    /// # Panics
    /// When there is not one key for each page.
    #[must_use]
    pub fn apart(
        start_page: u32,
        page_size: u32,
        keys: &'a [PageKey],
        tokens: &'a [Token],
    ) -> Self {
        let page_size = page_size as usize;
        assert_eq!(tokens.len(), keys.len() * page_size, "a key for each page");
        Self::behind_prompt(start_page, page_size, Part { keys, tokens, marks: None })
    }

    /// Pages of which none is the prompt's.
    pub(crate) fn behind_prompt(start_page: u32, page_size: usize, back: Part<'a>) -> Self {
        let (reach, front) = (Reach::L3, Part::EMPTY);
        Self { start_page, page_size, reach, prompt: None, front, back }
    }

    /// Pages of a prompt and what follows them.
    pub(crate) fn shared(
        start_page: u32,
        prompt: &'a Arc<Text>,
        pages: Range<usize>,
        back: Part<'a>,
    ) -> Self {
        let (page_size, start) = (prompt.page_size(), pages.start);
        let front = prompt.part(pages);
        let (reach, prompt) = (Reach::L3, Some((prompt, start)));
        Self { start_page, page_size, reach, prompt, front, back }
    }

    /// The same pages, written so far and no farther.
    #[must_use]
    #[inline]
    pub fn reaching(mut self, reach: Reach) -> Self {
        self.reach = reach;
        self
    }

    /// One key a page.
    #[must_use]
    pub fn keys(&self) -> Keys<'a> {
        Keys { prompt: self.front.keys, appended: self.back.keys }
    }

    /// The tokens of these pages; no page lies in both parts.
    #[must_use]
    pub fn tokens(&self) -> Tokens<'a> {
        Tokens { prompt: self.front.tokens, appended: self.back.tokens }
    }

    /// The tokens of each page, and the digest of the passages on it, if any of them has content.
    pub(crate) fn pages(&self) -> impl Iterator<Item = (&'a [Token], Option<u128>)> {
        let of = |part: Part<'a>, first: u32| {
            let pages = part.tokens.chunks_exact(self.page_size);
            (first..).zip(pages).map(move |(place, tokens)| {
                (tokens, part.marks.and_then(|marks| marks.content(place)))
            })
        };
        let border = self.start_page + self.front.keys.len() as u32;
        of(self.front, self.start_page).chain(of(self.back, border))
    }

    /// The key of the first page.
    ///
    /// # Panics
    /// When there is none.
    #[must_use]
    pub fn first_key(&self) -> PageKey {
        self.keys().get(0).expect("a run of at least a page")
    }

    /// The prompt and the place in it, if all pages are from one.
    pub(crate) fn within_prompt(&self) -> Option<(&'a Arc<Text>, usize)> {
        self.prompt.filter(|_| self.back.keys.is_empty())
    }

    /// A copy.
    pub(crate) fn to_text(self) -> Text {
        let mut text = Text::with_capacity(self.len(), self.page_size);
        self.append_to(&mut text);
        text
    }

    pub(crate) fn append_to(self, text: &mut Text) {
        // Mostly one of them is empty, and copying nothing costs two calls.
        for part in [self.front, self.back].into_iter().filter(|part| !part.keys.is_empty()) {
            text.append(part);
        }
    }

    pub(crate) fn page_size(&self) -> usize {
        self.page_size
    }

    /// The same run, for as long as it is kept.
    #[must_use]
    pub fn keep(self) -> KeptRun {
        let of_prompt = |(prompt, start): (&Arc<Text>, usize)| {
            (prompt.clone(), start..start + self.front.keys.len())
        };
        KeptRun { prompt: self.prompt.map(of_prompt), back: Text::copy(self.back, self.page_size) }
    }

    /// The same run without its first `pages`.
    #[must_use]
    pub fn skip(self, pages: usize) -> PageRun<'a> {
        let of_front = pages.min(self.front.keys.len());
        PageRun {
            start_page: self.start_page + pages as u32,
            page_size: self.page_size,
            reach: self.reach,
            prompt: self.prompt.map(|(prompt, start)| (prompt, start + of_front)),
            front: self.front.skip(of_front, self.page_size),
            back: self.back.skip(pages - of_front, self.page_size),
        }
    }

    /// Number of pages.
    #[must_use]
    pub fn len(&self) -> usize {
        self.keys().len()
    }

    /// Returns true if the run has no page.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

impl KeptRun {
    /// One key a page.
    #[must_use]
    pub fn keys(&self) -> Keys<'_> {
        let of_prompt = self.prompt.as_ref();
        let prompt = of_prompt.map_or(&[][..], |(prompt, pages)| &prompt.keys()[pages.clone()]);
        Keys { prompt, appended: self.back.keys() }
    }

    /// The first `pages` of it as a run that begins at page `start_page`.
    #[must_use]
    pub fn run(&self, start_page: u32, pages: usize) -> PageRun<'_> {
        let Some((prompt, all)) = &self.prompt else {
            let page_size = self.back.page_size();
            return PageRun::behind_prompt(start_page, page_size, self.back.part(0..pages));
        };
        let of_prompt = pages.min(all.len());
        let back = self.back.part(0..pages - of_prompt);
        PageRun::shared(start_page, prompt, all.start..all.start + of_prompt, back)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{ContentKey, Passage, Sequence};

    #[test]
    fn a_run_carries_its_own_tokens() {
        let sequence = Sequence::new(PageKey(7), 4, (0..16).collect());
        let run = sequence.run(1, 3).skip(1);
        assert_eq!((run.start_page, run.tokens().to_vec()), (2, vec![8, 9, 10, 11]));
        assert_eq!(run.first_key(), sequence.keys().get(2).unwrap());
    }

    #[test]
    fn a_run_may_lie_on_both_sides_of_the_prompts_end() {
        let mut sequence = Sequence::new(PageKey(7), 4, (0..10).collect());
        sequence.extend(&(10..21).collect::<Vec<_>>());
        let run = sequence.run(1, 5);
        assert_eq!(run.tokens().to_vec(), (4..20).collect::<Vec<_>>());
        assert_eq!(run.keys().to_vec(), sequence.keys().to_vec()[1..]);
        assert_eq!(run.skip(1).tokens().to_vec(), (8..20).collect::<Vec<_>>());
        assert_eq!(run.skip(2).tokens().prompt.len(), 0);
        assert_eq!(run.skip(2).tokens().appended.len(), 8);
        assert!(run.within_prompt().is_none());
        assert_eq!(sequence.run(1, 2).within_prompt().unwrap().1, 1);
    }

    #[test]
    fn a_kept_run_has_what_it_was_kept_with() {
        let mut sequence = Sequence::new(PageKey(7), 4, (0..10).collect());
        sequence.extend(&(10..21).collect::<Vec<_>>());
        let run = sequence.run(1, 5);
        let (keys, tokens) = (run.keys().to_vec(), run.tokens().to_vec());
        for kept in [run.keep(), PageRun::apart(1, 4, &keys, &tokens).keep()] {
            assert_eq!(kept.keys().to_vec(), keys);
            for pages in 0..=4 {
                let part = kept.run(7, pages);
                assert_eq!((part.start_page, &part.keys().to_vec()[..]), (7, &keys[..pages]));
                assert_eq!(part.tokens().to_vec(), tokens[..4 * pages]);
            }
        }
    }

    #[test]
    fn a_kept_run_behind_the_prompt_has_what_stands_on_its_pages() {
        let passage = Passage { start: 9, end: 10, content: Some(ContentKey(1)), is_whole: false };
        let prompt = (0..10).collect();
        let mut sequence = Sequence::with_passages(PageKey(7), 4, prompt, &[passage]).unwrap();
        sequence.extend(&[10, 11]);
        let kept = sequence.run(2, 3).keep();
        assert!(kept.run(2, 1).to_text().marks().is_some());
    }

    #[test]
    fn a_run_of_the_prompt_is_kept_without_a_copy() {
        let sequence = Sequence::new(PageKey(7), 4, (0..16).collect());
        let kept = sequence.run(1, 3).keep();
        assert!(std::ptr::eq(kept.keys().prompt, sequence.run(1, 3).keys().prompt));
        assert!(kept.keys().appended.is_empty());
    }
}
