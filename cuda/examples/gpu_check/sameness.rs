//! Bitwise equality of results, whatever the source of KV, the rest of the batch and the division
//! of a prompt.

use std::sync::Arc;

use terrace_cuda::{Context, CudaLlama};
use terrace_engine::{Choosing, Output, StepLimits};
use terrace_kit::Dice;
use terrace_model::Shape;
use terrace_scheduler::Token;

use crate::Done;
use crate::table::Table;
use crate::world::{Part, World, eight_billion, greedy, small};

/// Checks that all rows of products have the same bits as in the largest product: for numbers of
/// rows with a tuned algorithm and without, in the first layer and in another.
pub(crate) fn products(context: &Arc<Context>, table: &mut Table) -> Done {
    const COUNTS: [usize; 18] =
        [1, 2, 8, 24, 40, 56, 64, 80, 112, 144, 208, 256, 320, 1024, 1088, 2048, 3008, 4032];
    let large = Shape { layers: 3, ..eight_billion() };
    for (name, shape) in [("8 billion", large), ("small", small())] {
        let limits = StepLimits { page_size: 16, rows: 1, tokens_max: 4096 };
        let model = CudaLlama::random(context, &shape)?;
        let mut world = World::new(context, model, limits, 4096)?;
        for layer in [0, 2] {
            let differences = world.product_differences(layer, &COUNTS)?;
            let found = match &*differences {
                [] => format!("{} numbers of rows, all rows", COUNTS.len()),
                some => some.join("; "),
            };
            let what = format!("products of the {name} shape, layer {layer}");
            table.check(&what, &found, differences.is_empty());
        }
    }
    Ok(())
}

/// Checks that a machine has one KV fingerprint: after a restart, with other sizes, with stored
/// algorithms and without.
pub(crate) fn names(context: &Arc<Context>, table: &mut Table) -> Done {
    let folder = tempfile::tempdir()?;
    let kept = || Some(folder.path().to_owned());
    let mut names = std::collections::BTreeSet::new();
    for (page_size, tokens_max, folder) in [
        (16, 4096, None),
        (16, 512, None),
        (64, 2048, kept()),
        (16, 4096, kept()),
        (1, 4096, kept()),
    ] {
        let model = CudaLlama::random(context, &small())?.keep_choices_in(folder);
        let limits = StepLimits { page_size, rows: 2, tokens_max };
        names.insert(World::new(context, model, limits, 2048)?.fingerprint());
    }
    let files = std::fs::read_dir(folder.path())?.count();
    let found = format!(
        "{} names, {files} files: {}",
        names.len(),
        names.iter().next_back().map_or("", String::as_str)
    );
    table.check("the name of KV is the same", &found, names.len() == 1 && files == 1);
    Ok(())
}

/// Checks that logits and KV do not depend on the division of a sequence or on the rest of the
/// batch.
pub(crate) fn however_it_is_cut(context: &Arc<Context>, table: &mut Table) -> Done {
    let odd = Shape { dim: 448, heads: 14, kv_heads: 2, head_dim: 64, qkv_bias: true, ..small() };
    for (name, shape, page_size) in [("128 x 4", small(), 16), ("64 x 7 with biases", odd, 2)] {
        check(context, table, name, &shape, page_size)?;
    }
    whichever_kernels(context, table)
}

/// Checks that logits are equal without Hopper's attention kernels, which need pages of more than
/// four tokens.
fn whichever_kernels(context: &Arc<Context>, table: &mut Table) -> Done {
    const TOKENS: u32 = 2_500;
    let shape = small();
    let tokens = Dice::new(4).tokens(TOKENS as usize, shape.vocabulary);
    let (prompt, last) = tokens.split_at(tokens.len() - 1);
    let mut all = Vec::new();
    for page_size in [16, 4] {
        let limits = StepLimits { page_size, rows: 1, tokens_max: 4096 };
        let mut world = World::new(context, CudaLlama::random(context, &shape)?, limits, 4096)?;
        world.come(0, Choosing { logits: true, ..greedy() }, &[]);
        // Many tokens, and one.
        let mut logits = Vec::new();
        for part in [Part::new(0, 0, prompt), Part::new(0, TOKENS - 1, last)] {
            logits.extend(logits_of(world.step(&[part])?)?.remove(0));
        }
        all.push(logits);
    }
    let same = all[0].iter().zip(&all[1]).filter(|(a, b)| a.to_bits() == b.to_bits()).count();
    let is_same = same == all[0].len() && all[0].iter().all(|logit| logit.is_finite());
    let found = format!("{same} of {} logits", all[0].len());
    table.check("128 x 4: by kernels for small pages", &found, is_same);
    Ok(())
}

fn logits_of(outputs: Vec<Output>) -> Result<Vec<Box<[f32]>>, &'static str> {
    let each = outputs.into_iter().map(|output| output.chosen.and_then(|chosen| chosen.logits));
    each.collect::<Option<_>>().ok_or("no logits came")
}

fn check(
    context: &Arc<Context>,
    table: &mut Table,
    name: &str,
    shape: &Shape,
    page_size: u32,
) -> Done {
    const TOKENS: u32 = 2_500;
    let limits = StepLimits { page_size, rows: 8, tokens_max: 4096 };
    let mut world = World::new(context, CudaLlama::random(context, shape)?, limits, 4096)?;
    let mut dice = Dice::new(3);
    let sequences: Vec<Vec<Token>> =
        (0..8).map(|_| dice.tokens(TOKENS as usize, shape.vocabulary)).collect();
    for slot in 0..8 {
        world.come(slot, Choosing { logits: true, ..greedy() }, &[]);
    }
    let whole = logits_of(world.step(&[Part::new(0, 0, &sequences[0])])?)?.remove(0);
    let kv = world.kv(0, TOKENS)?;
    let compare = |table: &mut Table, what: &str, found: &[f32], pages: &[Vec<u8>]| {
        let same = whole.iter().zip(found).filter(|(a, b)| a.to_bits() == b.to_bits()).count();
        let same_pages = kv.iter().zip(pages).filter(|(a, b)| a == b).count();
        let is_finite = found.iter().all(|logit| logit.is_finite());
        let found = format!("{same} of {} logits, {same_pages} of {} pages", whole.len(), kv.len());
        let is_same = same == whole.len() && same_pages == kv.len() && is_finite;
        table.check(&format!("{name}: {what}"), &found, is_same);
    };
    // Divided at several places, in other pages.
    let mut cuts =
        vec![0, 1, 2, 5, 64, 127, 128, 129, 700, 1023, 1024, 1025, 1030, 2047, 2049, 2490];
    cuts.push(TOKENS);
    let mut last = None;
    for cut in cuts.windows(2) {
        let tokens = &sequences[0][cut[0] as usize..cut[1] as usize];
        last = Some(logits_of(world.step(&[Part::new(1, cut[0], tokens)])?)?.remove(0));
    }
    let pages = world.kv(1, TOKENS)?;
    compare(table, "cut here and there", &last.ok_or("no step")?, &pages);
    // With other sequences at other positions, and token by token at the end.
    let mut at = [0_u32; 8];
    let mut found = None;
    while at[2] < TOKENS {
        let mut parts = Vec::new();
        for slot in 2..8 {
            let most = if slot == 2 && at[2] >= 2_440 { 1 } else { 1 + dice.below(600) as u32 };
            let end = TOKENS.min(at[slot] + most);
            if end > at[slot] {
                let sequence = if slot == 2 { &sequences[0] } else { &sequences[slot] };
                let tokens = &sequence[at[slot] as usize..end as usize];
                parts.push(Part::new(slot as u32, at[slot], tokens));
                at[slot] = end;
            }
        }
        let is_there = parts[0].slot == 2;
        let all = logits_of(world.step(&parts)?)?;
        if is_there {
            found = all.into_iter().next();
        }
    }
    let pages = world.kv(2, TOKENS)?;
    compare(table, "with others beside, then token by token", &found.ok_or("no step")?, &pages);
    Ok(())
}
