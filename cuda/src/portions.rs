//! The division of a large copy into portions, so that the link does not wait for the thread that
//! prepares them.

use std::ops::Range;

/// Pages that are prepared before the first copy starts, about 10 µs of work.
const FIRST_PAGES: usize = 512;
/// Bytes that the link moves, at 50 GB/s, in the time in which one page is prepared.
const BYTES_MEANWHILE: usize = 2000;

/// Returns the portions of `pages` pages, of each of which `bytes` bytes are copied with its
/// portion.
///
/// The first portion is small, so that the copy starts at once. Later portions grow only as far as
/// each can be prepared while the one before it is copied: each portion costs the link some
/// microseconds, so there should be few. The last ones shrink, because the pages of the last
/// portion are released after the copy has ended.
pub(crate) fn portions(pages: usize, bytes: usize) -> Vec<Range<usize>> {
    let growth = (bytes / BYTES_MEANWHILE).clamp(2, 8);
    let (mut portions, mut start, mut size) = (Vec::new(), 0, FIRST_PAGES);
    loop {
        let left = pages - start;
        if left <= FIRST_PAGES + FIRST_PAGES / 2 {
            portions.push(start..pages);
            return portions;
        }
        let end = start + size.min(left - left / 8);
        portions.push(start..end);
        (start, size) = (end, size * growth);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sizes(pages: usize, bytes: usize) -> Vec<usize> {
        portions(pages, bytes).iter().map(Range::len).collect()
    }

    #[test]
    fn small_copy_is_one_portion() {
        assert_eq!(sizes(1, 4096), [1]);
        assert_eq!(sizes(768, 4096), [768]);
        assert_eq!(sizes(1000, 2 << 20), [512, 488]);
    }

    #[test]
    fn portions_grow_and_shrink_before_the_end() {
        assert_eq!(
            sizes(1 << 19, 4096),
            [
                512, 1024, 2048, 4096, 8192, 16_384, 32_768, 65_536, 131_072, 229_824, 28_728,
                3591, 513
            ]
        );
        assert_eq!(sizes(1 << 15, 64 << 10), [512, 4096, 24_640, 3080, 440]);
    }

    #[test]
    fn portions_cover_every_page_once() {
        for pages in [1, 511, 769, 1 << 12, 12_345, 1 << 17] {
            for bytes in [1, 4096, 1 << 20] {
                let portions = portions(pages, bytes);
                assert_eq!((portions[0].start, portions[portions.len() - 1].end), (0, pages));
                assert!(portions.windows(2).all(|two| two[0].end == two[1].start));
                assert!(portions.iter().all(|portion| !portion.is_empty()));
            }
        }
    }
}
