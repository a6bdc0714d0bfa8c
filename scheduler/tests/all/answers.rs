//! Several answers to one prompt: one submission, one prompt, a life for each.

use terrace_scheduler::{
    Config, Event, L3Config, L3Kind, Outcome, Plan, Request, RequestId, Scheduler, StateName,
    StepResult, Time, Token,
};

/// Three answers to a prompt of 38 tokens, in pages of 4.
fn answers() -> Request {
    let siblings = vec![RequestId(2), RequestId(3)];
    Request { siblings, ..Request::new(1, (0..38).collect(), 2) }
}

fn config() -> Config {
    let mut config = Config::builder().page_size(4).device_pages(64).build().expect("it can work");
    (config.batch.running_max, config.batch.step_tokens_max) = (4, 10);
    config
}

/// Computes a step, each token a 7; tells who was prefilled.
fn step(scheduler: &mut Scheduler, now: Time, plan: &Plan) -> Vec<RequestId> {
    let last = plan.prefills.iter().filter(|prefill| prefill.produces_token);
    let producing =
        last.map(|prefill| prefill.request).chain(plan.decodes.iter().map(|d| d.request));
    let result = |request| StepResult { request, tokens: &[7 as Token], finished: false };
    let results: Vec<_> = producing.map(result).collect();
    if let Some(step) = plan.step {
        let done = Event::StepDone { step, results: &results, failed: &[] };
        scheduler.advance(now, done).expect("it was planned");
    }
    scheduler.audit();
    plan.prefills.iter().map(|prefill| prefill.request).collect()
}

/// Runs to the end of all, every step a second after the one before; tells how many tokens of prompts were
/// computed.
fn run(scheduler: &mut Scheduler) -> u64 {
    for second in 1..100 {
        let now = Time(second * 1_000_000);
        let plan = scheduler.plan(now);
        let computes = |id| scheduler.state(RequestId(id)) == Some(StateName::Prefilling);
        let is_part = plan.prefills.iter().any(|prefill| !prefill.produces_token);
        assert!(!(is_part && computes(2) && computes(1)), "one takes a slot for all");
        step(scheduler, now, &plan);
        let stats = scheduler.stats();
        if stats.submitted == stats.finished + stats.aborted {
            return stats.prefilled_tokens;
        }
    }
    panic!("{:?}", scheduler.stats());
}

#[test]
fn siblings_share_one_copy_of_the_prompt() {
    let mut scheduler = Scheduler::new(config()).expect("it can work");
    scheduler.submit(Time(0), answers()).expect("a sound request");
    let prompt = |id| scheduler.tokens(RequestId(id)).expect("it is alive").prompt.as_ptr();
    assert_eq!([prompt(1), prompt(2)], [prompt(2), prompt(3)]);
    assert_eq!(scheduler.stats().submitted, 3);
}

#[test]
fn siblings_wait_for_whole_pages_without_a_time_limit() {
    for share_wait_max_ms in [0, 5, 60_000] {
        let mut config = config();
        config.queue.share_wait_max_ms = share_wait_max_ms;
        let mut scheduler = Scheduler::new(config).expect("it can work");
        scheduler.submit(Time(0), answers()).expect("a sound request");
        assert_eq!(run(&mut scheduler), 38 + 2 * 2, "{share_wait_max_ms} ms");
    }
}

#[test]
fn a_sibling_continues_when_the_producer_ends() {
    // The computing request is aborted after some steps, twice; the last may finish.
    for steps in 0..3 {
        let mut scheduler = Scheduler::new(config()).expect("it can work");
        scheduler.submit(Time(0), answers()).expect("a sound request");
        let mut prefilled = vec![RequestId(1)];
        for _ in 0..2 {
            for _ in 0..steps {
                let plan = scheduler.plan(Time(1));
                prefilled = step(&mut scheduler, Time(1), &plan);
                assert_eq!(prefilled.len(), 1, "one for all");
            }
            let first = prefilled[0];
            scheduler.abort(Time(1), first).expect("it is alive");
            prefilled = vec![RequestId(first.0 + 1)];
        }
        // Steps end with pages, so what was computed is there for the next.
        assert_eq!(run(&mut scheduler), 38, "after {steps} steps each");
        assert_eq!((scheduler.stats().finished, scheduler.stats().aborted), (1, 2));
    }
}

#[test]
fn l3_is_probed_once_for_all_siblings() {
    let mut config = config();
    config.cache.host_pages = 64;
    config.l3 = Some(L3Config { prefetch_threshold_pages: 1, ..L3Config::default() });
    config.queue.share_wait_max_ms = 1;
    let mut scheduler = Scheduler::new(config).expect("it can work");
    scheduler.submit(Time(0), answers()).expect("a sound request");
    let mut probes = 0;
    for ms in (0..2_000).step_by(10) {
        let plan = scheduler.plan(Time(ms * 1_000));
        for op in plan.l3.iter().filter(|op| op.kind == L3Kind::Probe) {
            assert_eq!((ms, plan.l3.len()), (0, 1));
            probes += 1;
            assert_eq!(scheduler.state(RequestId(2)), Some(StateName::Submitted));
            // It takes its time.
            let waits = scheduler.plan(Time(15_000));
            assert!(waits.step.is_none() && waits.l3.is_empty());
            let outcome = Outcome::Missing;
            let missing = Event::Operation { op: op.op, rank: 0, outcome };
            scheduler.advance(Time(16_000), missing).expect("it was planned");
        }
        step(&mut scheduler, Time(ms * 1_000), &plan);
    }
    assert_eq!((probes, scheduler.stats().prefilled_tokens), (1, 42));
}
