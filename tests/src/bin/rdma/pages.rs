//! The pages of the holder.

use terrace_l3::Arena;
use terrace_tests::l3::objects::{fill, is_right, page};

/// Pages of one size.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Pool {
    /// A typical batch.
    Usual,
    /// More pages than a link reads at a time.
    Many,
    /// A page longer than a single soft-RoCE read.
    Long,
    /// Enough that reading it takes a while.
    Much,
}

impl Pool {
    pub(crate) const ALL: [Self; 4] = [Self::Usual, Self::Many, Self::Long, Self::Much];

    pub(crate) fn index(self) -> usize {
        self as usize
    }

    pub(crate) fn pages(self) -> u32 {
        match self {
            Self::Usual => 64,
            Self::Many => 600,
            Self::Long => 1,
            Self::Much => 128,
        }
    }

    pub(crate) fn page_bytes(self) -> usize {
        match self {
            Self::Usual => 64 << 10,
            // An unaligned size.
            Self::Many => 4099,
            Self::Long => (12 << 20) + 1,
            Self::Much => 512 << 10,
        }
    }

    pub(crate) fn bytes(self) -> u64 {
        u64::from(self.pages()) * self.page_bytes() as u64
    }

    /// Allocates memory for all pages.
    pub(crate) fn arena(self) -> Arena {
        Arena::with_headroom(self.pages(), self.page_bytes()).expect("there is memory")
    }

    fn number(self, page: u32) -> u64 {
        (self.index() as u64) << 32 | u64::from(page)
    }

    /// Writes the expected content of each page.
    pub(crate) fn fill(self, arena: &Arena) {
        for index in 0..self.pages() {
            let mut target = arena.target(index).expect("the page is not in use");
            fill(&page(self.number(index)), &mut target);
        }
    }

    /// Returns whether a page of the arena has the expected content.
    pub(crate) fn is_right(self, arena: &Arena, index: u32) -> bool {
        let source = arena.source(index).expect("the page has no writer");
        is_right(&page(self.number(index)), &source)
    }
}
