//! In which order the parts of pages are copied.

use std::ops::Range;

use terrace_engine::PageLayout;
use terrace_scheduler::CopyDirection;

use crate::driver::Part;

/// What a launch should move at least, so that its beginning and end do not count: some 80 µs of the link.
const GROUP_BYTES_MIN: usize = 4 << 20;
/// Pieces of this size go by the copy engines as fast as by the copy kernel, which takes room from steps.
const ENGINE_PIECE_BYTES: usize = 256 << 10;
/// As many groups a page should have at least, so that a step can begin before most of it is there.
const GROUPS_MIN: usize = 4;

/// Layers that arrive together.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Group {
    /// The first so many layers are there with it.
    pub(crate) layers: usize,
    /// What is copied of every page.
    pub(crate) parts: Vec<Part>,
}

impl Group {
    /// Bytes of every page.
    pub(crate) fn bytes(&self) -> usize {
        self.parts.iter().map(|part| part.bytes).sum()
    }
}

/// The groups of a copy of so many pages. What is loaded comes layer by layer, as steps need it; what is written back
/// nobody reads before it is whole.
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

/// Adds a range to others; neighbours become one.
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
    fn few_pages_come_in_few_groups_and_many_in_pieces_for_copy_engines() {
        // 64 KiB a layer, 2 MiB a page.
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
    fn small_pages_come_layer_by_layer() {
        // 4 KiB a layer, 64 KiB a page.
        let layout = KvLayout::keys_and_values(KvType::Bf16, 16, 1, 64).pages(16).unwrap();
        assert_eq!(groups(&layout, CopyDirection::LoadBack, 10_000).len(), 16);
    }

    #[test]
    fn a_layer_in_several_slabs_has_a_part_of_each() {
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
