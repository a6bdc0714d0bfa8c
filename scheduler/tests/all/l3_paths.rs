//! Paths of L3 operations, and prompts with precomputed keys.

use terrace_scheduler::{
    Config, Event, L3Config, L3Kind, L3Op, L3Path, OpId, Outcome, PageKey, Plan, PrefixDigest,
    Prompt, Request, RequestId, Scheduler, Sequence, StepResult, Time, Token,
};

const PAGE_SIZE: u32 = 4;

fn scheduler() -> Scheduler {
    scheduler_that_stores(64)
}

/// One that stores so many pages at a time.
fn scheduler_that_stores(backup_pages_max: u32) -> Scheduler {
    let config = Config::builder().page_size(PAGE_SIZE).device_pages(64).host_pages(64);
    let mut config = config.build().expect("it can work");
    config.l3 = Some(L3Config { backup_pages_max, ..L3Config::default() });
    // Whatever L3 has is worth fetching.
    config.rates.prefill_ns_per_token = 1_000_000_000;
    Scheduler::new(config).expect("it can work")
}

fn tokens(range: std::ops::Range<Token>) -> Vec<Token> {
    range.collect()
}

fn sequence(scheduler: &Scheduler, tokens: Vec<Token>) -> Sequence {
    Sequence::new(scheduler.namespace_of("", ""), PAGE_SIZE, tokens)
}

/// All keys of a path.
fn all(path: &L3Path<'_>) -> Vec<PageKey> {
    path.pieces().iter().flat_map(|piece| piece.keys).copied().collect()
}

/// Checks that the path of a plan's only operation leads along a sequence to the last page that the plan
/// is about, and tells where those pages begin.
fn check_path<'p>(
    scheduler: &mut Scheduler,
    plan: &'p Plan,
    sequence: &Sequence,
) -> (&'p L3Op, usize) {
    let [op] = &plan.l3[..] else { panic!("one operation, not {:?}", plan.l3) };
    let path = scheduler.l3_path(op.op).expect("it is in flight");
    assert_eq!(path.asked().collect::<Vec<_>>(), plan.l3_keys(op));
    assert_eq!(path.pages(), plan.l3_keys(op).len());
    let keys = all(&path);
    assert_eq!(keys, sequence.keys().to_vec()[..keys.len()]);
    let start = keys.len() - path.pages();
    check_digests(scheduler, op, &sequence.prefix(keys.len() as u32), start);
    (op, start)
}

/// Checks that an operation has the digests of the last pages of a sequence, from one place on, however often it is
/// asked.
fn check_digests(scheduler: &mut Scheduler, op: &L3Op, sequence: &Sequence, start: usize) {
    let mut expected = Vec::new();
    let pages = sequence.keys().len() as u32;
    PrefixDigest::of_namespace(sequence.root()).extend_along(sequence.run(0, pages), &mut expected);
    let moves = op.kind != L3Kind::Probe;
    for _ in 0..2 {
        let mut digests = Vec::new();
        scheduler.l3_digests(op.op, &mut digests);
        assert_eq!(digests, if moves { &expected[start..] } else { &[] });
        scheduler.audit();
    }
}

fn ended(scheduler: &mut Scheduler, op: OpId, outcome: Outcome) {
    let event = Event::Operation { op, rank: 0, outcome };
    scheduler.advance(Time(1), event).expect("it was planned");
}

/// Runs a request of one new token to its end, and its copies; L3 has nothing of it. Gives the backup.
fn run(scheduler: &mut Scheduler, id: u64, prompt: Vec<Token>) -> Plan {
    scheduler.submit(Time(1), Request::new(id, prompt, 1)).expect("a sound request");
    loop {
        let plan = scheduler.plan(Time(1));
        match &plan.l3[..] {
            [L3Op { op, kind: L3Kind::Probe, .. }] => ended(scheduler, *op, Outcome::Missing),
            [L3Op { kind: L3Kind::Backup, .. }] => return plan,
            _ => {}
        }
        plan.copies.iter().for_each(|copy| ended(scheduler, copy.op, Outcome::Done));
        if let Some(step) = plan.step {
            let results = [StepResult { request: RequestId(id), tokens: &[9], finished: true }];
            scheduler
                .advance(Time(1), Event::StepDone { step, results: &results, failed: &[] })
                .expect("it fits");
        }
    }
}

#[test]
fn a_path_covers_the_sequence_up_to_the_last_page_of_the_operation() {
    let mut scheduler = scheduler();
    let short = sequence(&scheduler, tokens(0..40));
    let backup = run(&mut scheduler, 1, tokens(0..40));
    let (op, start) = check_path(&mut scheduler, &backup, &short);
    assert_eq!((op.kind, start, backup.l3_keys(op).len()), (L3Kind::Backup, 0, 10));
    ended(&mut scheduler, op.op, Outcome::Done);
    assert!(scheduler.l3_path(op.op).is_none(), "it is over");

    // The cache has ten pages of it: L3 is asked for those behind.
    let long = sequence(&scheduler, tokens(0..100));
    scheduler.submit(Time(1), Request::new(2, tokens(0..100), 1)).expect("a sound request");
    let probe = scheduler.plan(Time(1));
    let (op, start) = check_path(&mut scheduler, &probe, &long);
    assert_eq!((op.kind, start), (L3Kind::Probe, 10));
    ended(&mut scheduler, op.op, Outcome::Partial(8));
    let prefetch = scheduler.plan(Time(1));
    let (op, start) = check_path(&mut scheduler, &prefetch, &long);
    assert_eq!((op.kind, start, prefetch.l3_keys(op).len()), (L3Kind::Prefetch, 10, 8));
    // No request waits for it any more: the path before it is remembered instead of pinned.
    scheduler.abort(Time(1), RequestId(2)).expect("it is alive");
    assert_eq!(check_path(&mut scheduler, &prefetch, &long).1, 10);
    ended(&mut scheduler, op.op, Outcome::Done);

    // What L3 has, came from it or was stored, is not stored again.
    let other: Vec<Token> = (0..72).chain(500..540).collect();
    let backup = run(&mut scheduler, 3, other.clone());
    let other = sequence(&scheduler, other);
    let (op, start) = check_path(&mut scheduler, &backup, &other);
    assert_eq!((op.kind, start, backup.l3_keys(op).len()), (L3Kind::Backup, 18, 10));
    scheduler.audit();
}

#[test]
fn a_path_ends_with_its_operation() {
    let mut scheduler = scheduler_that_stores(6);
    let sequence = sequence(&scheduler, tokens(0..40));
    let first = run(&mut scheduler, 1, tokens(0..40));
    let (op, start) = check_path(&mut scheduler, &first, &sequence);
    assert_eq!((start, first.l3_keys(op).len()), (0, 6));
    ended(&mut scheduler, op.op, Outcome::Done);
    let second = scheduler.plan(Time(1));
    let (op, start) = check_path(&mut scheduler, &second, &sequence);
    assert_eq!((start, second.l3_keys(op).len()), (6, 4));
}

#[test]
fn a_probe_without_a_waiting_request_has_no_path() {
    let mut scheduler = scheduler();
    scheduler.submit(Time(1), Request::new(1, tokens(0..40), 1)).expect("a sound request");
    let op = scheduler.plan(Time(1)).l3[0].op;
    assert!(scheduler.l3_path(op).is_some());
    scheduler.abort(Time(1), RequestId(1)).expect("it is alive");
    assert!(scheduler.l3_path(op).is_none());
    assert!(scheduler.l3_path(OpId(99)).is_none());
}

#[test]
fn precomputed_keys_are_used_only_in_their_own_namespace() {
    fn asked<P: Prompt>(request: Request<P>) -> Vec<PageKey> {
        let mut scheduler = scheduler();
        scheduler.submit(Time(1), request).expect("a sound request");
        let plan = scheduler.plan(Time(1));
        let taken = scheduler.tokens(RequestId(1)).expect("it is alive");
        assert_eq!((taken.prompt, taken.appended), (&tokens(0..42)[..], &[][..]));
        plan.l3_keys(&plan.l3[0]).to_vec()
    }
    let plain = asked(Request::new(1, tokens(0..42), 1));
    let hashed = |sequence: Sequence| asked(Request::hashed(1, sequence, 1));
    let namespace = scheduler().namespace_of("", "");
    assert_eq!(hashed(Sequence::new(namespace, PAGE_SIZE, tokens(0..42))), plain);
    assert_eq!(hashed(Sequence::new(PageKey(7), PAGE_SIZE, tokens(0..42))), plain);
    assert_eq!(hashed(Sequence::new(namespace, 2 * PAGE_SIZE, tokens(0..42))), plain);
    // What was appended is part of the prompt like the rest.
    for namespace in [namespace, PageKey(7)] {
        let mut appended = Sequence::new(namespace, PAGE_SIZE, tokens(0..19));
        appended.extend(&tokens(19..42));
        assert_eq!(hashed(appended), plain);
    }
    let empty = Request::hashed(1, Sequence::new(namespace, PAGE_SIZE, Vec::new()), 1);
    assert!(scheduler().submit(Time(1), empty).is_err());
}
