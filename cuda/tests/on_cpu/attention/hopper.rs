//! Hopper's kernels give the same results as the others, to the bit, with NaN behind the end of
//! sequences in their pages.

use super::{Apart, FEW_ROWS, LAYER, ROWS, SPOILT, Scene, Span, TILE, WHOLE, parts_of};
use crate::library::{Arguments, Block, FEW_PLACES, Kernels};
use crate::{Statement, assert_missed, with_hopper_sizes};

const PLACES: usize = 8;
const TILE_BYTES: usize = TILE * 128 * 2;

impl Scene<'_> {
    fn map<'b>(&'b self, arguments: Arguments<'b>) -> Arguments<'b> {
        let [dim, page_size] = [self.sizes.head_dim, self.sizes.page_size].map(|it| it as u64);
        let blocks = self.kv.len() as u64 / (page_size * dim);
        let sizes = [64, page_size, dim / 64, blocks];
        let strides = [dim * 2, 128, page_size * dim * 2];
        arguments.map(&self.kv, &sizes, &strides, &[64, page_size.min(TILE as u64), 1, 1])
    }

    fn launch_on_hopper(
        &self,
        items: &[[u32; 8]],
        found: &mut [u16],
        partials: &mut [f32],
    ) -> Result<(), String> {
        let block = Block::new(384, PLACES * TILE_BYTES + ROWS * 128 * (2 + 4));
        let arguments = self.map(self.arguments(found).list(items).out(partials)).number(LAYER);
        let blocks = items.len() * self.sizes.kv_heads;
        self.kernels.try_launch("attend_on_hopper", blocks, block, arguments)
    }

    /// Runs `attend_on_hopper` on items of at most `tokens_max` tokens.
    fn attend_on_hopper(&self, spans: &[Span], tokens_max: usize) -> Result<Vec<u16>, String> {
        let parts = parts_of(spans, tokens_max);
        let items: Vec<_> = parts.iter().map(|part| part.item(0..part.end(), WHOLE)).collect();
        let mut found = self.nothing_found();
        self.launch_on_hopper(&items, &mut found, &mut [])?;
        Ok(found)
    }

    /// Runs it on separate segments, and `join`.
    fn attend_apart_on_hopper(&self, spans: &[Span], tokens_max: usize) -> Vec<u16> {
        let parts = parts_of(spans, tokens_max);
        let apart = Apart::new(&parts, (ROWS / FEW_ROWS) as u32, self.sizes);
        let (mut found, mut partials) = (self.nothing_found(), self.room_for(&apart));
        self.launch_on_hopper(&apart.items, &mut found, &mut partials).unwrap();
        self.join(&apart, &partials, &mut found, 7);
        found
    }

    /// Runs `attend_few_on_hopper` and `join`.
    fn attend_few_on_hopper(&self, spans: &[Span], blocks: usize) -> Result<Vec<u16>, String> {
        let apart = Apart::new(spans, 1, self.sizes);
        let (mut found, mut partials) = (self.nothing_found(), self.room_for(&apart));
        let shared_bytes = FEW_PLACES * TILE_BYTES + FEW_ROWS * 128 * 2 + FEW_ROWS * TILE * 2;
        let item_count = [apart.items.len() as u32];
        let arguments = self.arguments(&mut found).list(&apart.items).list(&item_count);
        let arguments = self.map(arguments.out(&mut partials)).number(LAYER);
        let block = Block::new(160, shared_bytes);
        self.kernels.try_launch("attend_few_on_hopper", blocks, block, arguments)?;
        self.join(&apart, &partials, &mut found, blocks);
        Ok(found)
    }
}

#[test]
#[ignore = "needs g++: scripts/test-cuda installs it"]
fn hopper_attend_equals_attend_to_the_bit() {
    with_hopper_sizes(|kernels| {
        let most = ROWS / kernels.sizes.group;
        let spans =
            [(0, 1), (0, 3), (7, 1), (63, 2), (64, 40), (130, most + 3), (1_010, 20), (2_030, 35)];
        let scene = Scene::new(kernels, &spans);
        let others = scene.attend(&scene.spans, most);
        scene.assert_same(
            &scene.attend_on_hopper(&scene.spans, most).unwrap(),
            &others,
            &scene.spans,
        );
        scene.assert_same(&scene.attend_apart_on_hopper(&scene.spans, most), &others, &scene.spans);
        for span in &scene.spans {
            scene.check(&others, span, span.tokens - 1..span.tokens);
        }
    });
}

#[test]
#[ignore = "needs g++: scripts/test-cuda installs it"]
fn hopper_attend_few_equals_attend_few_to_the_bit() {
    with_hopper_sizes(|kernels| {
        let few = FEW_ROWS / kernels.sizes.group;
        let ends = [
            (0, 1),
            (0, 2),
            (14, 3),
            (62, 4),
            (127, 2),
            (500, 1),
            (1_020, 5),
            (1_023, 1),
            (1_087, 2),
            (2_599, 1),
        ];
        let ends = ends.map(|(position, tokens)| (position, few.min(tokens)));
        let scene = Scene::new(kernels, &ends);
        let others = scene.attend_few(&scene.spans, 5);
        for blocks in [3, 40] {
            let found = scene.attend_few_on_hopper(&scene.spans, blocks).unwrap();
            scene.assert_same(&found, &others, &scene.spans);
        }
    });
}

/// Returns whether `find` gives the same results as `others`.
fn is_found(
    kernels: &Kernels<'_>,
    spans: &[(usize, usize)],
    others: impl Fn(&Scene<'_>) -> Vec<u16>,
    find: impl Fn(&Scene<'_>) -> Result<Vec<u16>, String>,
) -> bool {
    let scene = Scene::new(kernels, spans);
    let expected = others(&scene);
    assert!(!expected.contains(&SPOILT), "those without Hopper's instructions find all");
    find(&scene).is_ok_and(|found| found == expected)
}

#[test]
#[ignore = "needs g++: scripts/test-cuda installs it"]
fn hopper_attend_needs_its_barriers_and_fences() {
    const STATEMENTS: [Statement; 13] = [
        ("", "publish_barriers();"),
        ("wait_for_groups<0>();\n    ", "__syncthreads();"),
        ("if (lane == 0) ", "arrive_and_expect(barrier, TILE_BYTES);"),
        ("if (turn > 0) ", "wait(copies.empty + place * 8, (turn - 1) % 2);"),
        ("u32 at = tile * 2;\n        ", "wait(full + at % PLACES * 8, at / PLACES % 2);"),
        ("u32 at = tile * 2 + 1;\n        ", "wait(full + at % PLACES * 8, at / PLACES % 2);"),
        ("", "wait(full + last % PLACES * 8, last / PLACES % 2);"),
        ("", "clear_tail<128>(tiles_at + last % PLACES * TILE_BYTES, left, threadIdx.x % 128);"),
        ("}\n    ", "publish_to_products();"),
        ("if (warp < 4) ", "meet<1, 128>();"),
        ("", "begin_products();"),
        ("", "wait_for_products<1>();"),
        ("softmax_weights(tile + 1);\n            ", "wait_for_products<0>();"),
    ];
    assert_missed(&STATEMENTS, |kernels| {
        let most = ROWS / kernels.sizes.group;
        let others = |scene: &Scene<'_>| scene.attend(&scene.spans, most);
        // The second sequence ends with its last tile.
        is_found(kernels, &[(5, 1), (448 - most, most)], others, |scene| {
            scene.attend_on_hopper(&scene.spans, most)
        })
    });
}

#[test]
#[ignore = "needs g++: scripts/test-cuda installs it"]
fn hopper_attend_few_needs_its_barriers_and_fences() {
    const STATEMENTS: [Statement; 11] = [
        ("", "publish_barriers();"),
        ("publish_barriers();\n    }\n    ", "__syncthreads();"),
        ("if (turn > 0) ", "wait(copies.empty + place * 8, (turn - 1) % 2);"),
        ("wait_for_groups<0>();\n        ", "meet();"),
        ("few.mask(scores, tile_start, highest_of);\n            ", "meet();"),
        ("few.softmax_weights(scores, scale, highest_of, weights_at);\n            ", "meet();"),
        ("", "clear_tail<128>(values_at, item.keys_end - tile_start, threadIdx.x);"),
        ("item.keys_end - tile_start, threadIdx.x);\n                ", "meet();"),
        ("}\n    ", "publish_to_products();"),
        ("", "if (lane == 0) arrive(empty + place * 8);"),
        ("few.publish_sums(sum_of);\n        ", "meet();"),
    ];
    assert_missed(&STATEMENTS, |kernels| {
        let others = |scene: &Scene<'_>| scene.attend_few(&scene.spans, 5);
        is_found(kernels, &[(5, 1), (420, 2), (77, 1), (1_060, 1)], others, |scene| {
            scene.attend_few_on_hopper(&scene.spans, 2)
        })
    });
}
