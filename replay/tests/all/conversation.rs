//! Mooncake's conversation trace, whose figures are known. It is not part of the repository: the
//! test reads the file that `TERRACE_CONVERSATION_TRACE` names, if set.

use std::path::Path;

use terrace_replay::trace::{ReadOptions, ReuseCurve};
use terrace_replay::{Options, Setting, Trace};

fn conversation() -> Option<Trace> {
    let path = std::env::var_os("TERRACE_CONVERSATION_TRACE")?;
    let reading = Trace::read(Path::new(&path), &ReadOptions::default()).expect("a sound trace");
    Some(reading.trace)
}

#[test]
fn lengths_and_ceiling_match_published_figures() {
    let Some(trace) = conversation() else { return };
    assert_eq!(trace.requests().len(), 12_031);
    let ceiling = trace.ceiling(16);
    assert_eq!((ceiling.prompt_tokens, ceiling.reusable_tokens), (144_793_823, 54_097_440));
    assert_eq!(ceiling.by_request.iter().map(|&tokens| u64::from(tokens)).sum::<u64>(), 54_097_440);
    let curve = ReuseCurve::new(&trace, 16);
    assert_eq!(curve.reusable_tokens(u64::MAX), 54_097_440);
    // Page caches measured under the same load reach 0.0496 to 0.0502 and 0.147 to 0.149.
    assert!((0.0495..0.0503).contains(&curve.ratio(50_000)), "{}", curve.ratio(50_000));
    assert!((0.146..0.150).contains(&curve.ratio(200_000)), "{}", curve.ratio(200_000));
}

#[test]
fn unlimited_l3_nearly_reaches_the_ceiling() {
    let Some(trace) = conversation() else { return };
    let mut options = Options::default();
    options.set(Setting::Device, "1048576");
    let report = terrace_replay::replay(&trace, &options.config().unwrap()).unwrap();
    assert_eq!(report.finished, 12_031);
    assert!(report.reuse.total <= report.reuse.ceiling);
    let share = report.reuse.total / report.reuse.ceiling;
    assert!(share >= 0.99, "{share}");
}
