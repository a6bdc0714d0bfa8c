//! The order in which the parts of pages are copied.

use std::ops::Range;

use terrace_engine::PageLayout;
use terrace_scheduler::CopyDirection;

use crate::driver::Part;

/// Smallest amount for a launch, so that its overhead is negligible: about 80 µs of the link.
const GROUP_BYTES_MIN: usize = 4 << 20;
/// Piece size from which the copy engines are as fast as the copy kernel, which occupies
/// multiprocessors.
const ENGINE_PIECE_BYTES: usize = 256 << 10;
/// Minimum number of groups of a page, so that a step can start before most of it has arrived.
const GROUPS_MIN: usize = 4;

/// Layers that arrive together.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Group {
    /// Number of leading layers that have arrived with this group.
    pub(crate) layers: usize,
    /// Parts of every page to copy.
    pub(crate) parts: Vec<Part>,
}

impl Group {
    /// Returns the bytes of every page.
    pub(crate) fn bytes(&self) -> usize {
        self.parts.iter().map(|part| part.bytes).sum()
    }
}

/// Returns the groups of a copy. Load-backs are divided by layers, in the order in which steps need
/// them. Write-backs are not divided, because a page is not read before it is complete.
pub(crate) fn groups(layout: &PageLayout, direction: CopyDirection, pages: usize) -> Vec<Group> {
    let all = layout.layers();
    match direction {
        CopyDirection::WriteBack => {
            let parts = vec![Part { offset: 0, bytes: layout.bytes() }];
            vec![Group { layers: all, parts }]
        }
        CopyDirection::LoadBack => {
            let is_large = layout.bytes() >= GROUPS_MIN * ENGINE_PIECE_BYTES;
            let piece_bytes_min = if is_large { ENGINE_PIECE_BYTES } else { 0 };
            let mut groups = Vec::new();
            let mut ranges: Vec<Range<usize>> = Vec::new();
            for layer in 0..all {
                layout.layer(layer).for_each(|range| join(&mut ranges, range));
                let bytes: usize = ranges.iter().map(Range::len).sum();
                let is_enough =
                    bytes * pages >= GROUP_BYTES_MIN && bytes >= ranges.len() * piece_bytes_min;
                if is_enough || layer + 1 == all {
                    let parts = ranges
                        .drain(..)
                        .map(|range| Part { offset: range.start, bytes: range.len() });
                    groups.push(Group { layers: layer + 1, parts: parts.collect() });
                }
            }
            groups
        }
    }
}

/// Adds a range and merges it with its neighbours.
fn join(ranges: &mut Vec<Range<usize>>, range: Range<usize>) {
    match ranges.iter_mut().find(|before| before.end == range.start) {
        Some(before) => before.end = range.end,
        None => ranges.push(range),
    }
}

#[cfg(test)]
mod tests {
    use terrace_engine::{KvForm, KvLayout, KvType, Slab};

    use super::*;

    #[test]
    fn groups_depend_on_the_number_of_pages() {
        // 64 KiB per layer, 2 MiB per page.
        let layout = KvLayout::keys_and_values(KvType::Bf16, 32, 8, 128).pages(16).unwrap();
        let of = |pages| groups(&layout, CopyDirection::LoadBack, pages);
        assert_eq!(of(1), [Group { layers: 32, parts: vec![Part { offset: 0, bytes: 2 << 20 }] }]);
        let ten: Vec<_> =
            of(10).iter().map(|group| (group.layers, group.parts[0].offset)).collect();
        assert_eq!(ten, [(7, 0), (14, 7 << 16), (21, 14 << 16), (28, 21 << 16), (32, 28 << 16)]);
        let many: Vec<_> = of(1000).iter().map(|group| group.layers).collect();
        assert_eq!(many, [4, 8, 12, 16, 20, 24, 28, 32], "pieces of 256 KiB");
        assert_eq!(groups(&layout, CopyDirection::WriteBack, 1000).len(), 1);
    }

    #[test]
    fn small_pages_arrive_layer_by_layer() {
        // 4 KiB per layer, 64 KiB per page.
        let layout = KvLayout::keys_and_values(KvType::Bf16, 16, 1, 64).pages(16).unwrap();
        assert_eq!(groups(&layout, CopyDirection::LoadBack, 10_000).len(), 16);
    }

    #[test]
    fn layer_in_several_slabs_has_a_part_of_each() {
        let slab =
            |layers, dtype, elements| Slab { layers, dtype, form: KvForm::Vector { elements } };
        let layout = KvLayout {
            slabs: vec![
                slab(0..2, KvType::F32, 1 << 20),
                slab(0..2, KvType::U8, 1 << 10),
                slab(1..2, KvType::U8, 1 << 11),
            ],
        };
        let layout = layout.pages(1).unwrap();
        let groups = groups(&layout, CopyDirection::LoadBack, 1);
        let part = |offset, bytes| Part { offset, bytes };
        let (first, second) = (4 << 20, 8 << 20);
        assert_eq!(groups[0].parts, [part(0, first), part(second, 1 << 10)]);
        assert_eq!(groups[1].parts, [part(first, first), part(second + 1024, 1024 + 2048)]);
        let bytes: usize = groups.iter().map(Group::bytes).sum();
        assert_eq!(bytes, layout.bytes(), "every byte once");
    }
}
