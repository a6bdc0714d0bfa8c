//! Guarantees for an engine that embeds a scheduler.

use terrace_scheduler::{
    Config, Event, Outcome, Plan, Request, RequestId, Scheduler, Stats, StepResult, SubmitError,
    Time,
};

fn scheduler() -> Scheduler {
    let config = Config::builder().page_size(4).device_pages(64).build().expect("it can work");
    Scheduler::new(config).expect("it can work")
}

#[test]
fn a_scheduler_can_be_moved_to_and_shared_with_other_threads() {
    fn movable<T: Send + Sync + 'static>(_: &T) {}
    movable(&scheduler());
    movable(&Plan::default());
}

#[test]
fn while_a_step_is_in_flight_plans_compute_nothing() {
    let mut scheduler = scheduler();
    scheduler.submit(Time(0), Request::new(1, vec![1, 2, 3], 4)).expect("a sound request");
    let step = scheduler.plan(Time(0)).step.expect("there is a prompt");
    scheduler.submit(Time(1), Request::new(2, vec![4, 5, 6], 4)).expect("a sound request");
    assert!(scheduler.plan(Time(1)).is_idle());
    let results = [StepResult { request: RequestId(1), tokens: &[9], finished: false }];
    scheduler
        .advance(Time(2), Event::StepDone { step, results: &results, failed: &[] })
        .expect("it fits");
    let plan = scheduler.plan(Time(2));
    assert_eq!((plan.decodes.len(), plan.prefills.len()), (1, 1));
}

#[test]
fn a_reused_plan_is_cleared() {
    let mut scheduler = scheduler();
    let mut plan = Plan::default();
    scheduler.submit(Time(0), Request::new(1, vec![1, 2, 3], 4)).expect("a sound request");
    scheduler.plan_into(Time(0), &mut plan);
    assert!(!plan.is_idle());
    scheduler.plan_into(Time(0), &mut plan);
    assert_eq!(plan, Plan::default());
}

#[test]
fn an_id_can_be_reused_after_its_end_is_reported() {
    let mut scheduler = scheduler();
    let request = || Request::new(1, vec![1, 2, 3], 4);
    for _ in 0..3 {
        scheduler.submit(Time(0), request()).expect("the id is free");
        scheduler.plan(Time(0));
        scheduler.abort(Time(0), RequestId(1)).expect("it is alive");
        let early = scheduler.submit(Time(0), request());
        assert_eq!(early, Err(SubmitError::DuplicateId(RequestId(1))), "nobody knows of its end");
        assert_eq!(scheduler.plan(Time(0)).ended.len(), 1);
        scheduler.audit();
    }
    assert_eq!(scheduler.stats().aborted, 3);
}

#[test]
fn time_that_runs_backwards_is_clamped() {
    let mut scheduler = scheduler();
    scheduler.submit(Time(100), Request::new(1, vec![1, 2, 3], 4)).expect("a sound request");
    assert!(scheduler.plan(Time(5)).step.is_some());
    scheduler.audit();
}

/// Runs a few requests to their end, each step repeated as often as the plan and `repeats_max` allow.
/// Tells what the scheduler has counted, how many plans it took, and what each request produced.
fn run_repeating(repeats_max: u32) -> (Stats, u32, Vec<(RequestId, u32)>) {
    let config = Config::builder().page_size(4).device_pages(64).host_pages(64);
    let mut config = config.build().expect("it can work");
    config.batch.repeats_max = repeats_max;
    let mut scheduler = Scheduler::new(config).expect("it can work");
    for (id, prompt, max_new) in [(1, 3, 30), (2, 9, 7), (3, 6, 19)] {
        scheduler.submit(Time(0), Request::new(id, vec![7; prompt], max_new)).expect("it fits");
    }
    let (mut plans, mut produced) = (0, Vec::new());
    loop {
        let plan = scheduler.plan(Time(plans.into()));
        assert!(plan.repeats_max <= repeats_max);
        for copy in &plan.copies {
            let event = Event::Operation { op: copy.op, rank: 0, outcome: Outcome::Done };
            scheduler.advance(Time(plans.into()), event).expect("it was planned");
        }
        let Some(step) = plan.step else { break };
        plans += 1;
        let tokens = vec![9; 1 + plan.repeats_max as usize];
        let last_chunks = plan.prefills.iter().filter(|prefill| prefill.produces_token);
        let decodes = plan.decodes.iter().map(|decode| decode.request);
        let requests = last_chunks.map(|prefill| prefill.request).chain(decodes);
        let results: Vec<_> = requests
            .map(|request| StepResult { request, tokens: &tokens, finished: false })
            .collect();
        produced.extend(results.iter().map(|result| (result.request, tokens.len() as u32)));
        let event = Event::StepDone { step, results: &results, failed: &[] };
        scheduler.advance(Time(plans.into()), event).expect("it fits");
        scheduler.audit();
    }
    (scheduler.stats(), plans, produced)
}

#[test]
fn repeated_steps_equal_steps_planned_one_by_one() {
    let (one_by_one, plans, _) = run_repeating(0);
    assert_eq!((u64::from(plans), one_by_one.finished), (one_by_one.steps, 3));
    for (repeats_max, plans_max) in [(1, 20), (2, 18), (100, 16)] {
        let (stats, plans, produced) = run_repeating(repeats_max);
        assert!(plans <= plans_max, "{plans} plans for {} steps", stats.steps);
        assert_eq!(stats, one_by_one);
        for (id, max_new) in [(1, 30), (2, 7), (3, 19)] {
            let of_request = produced.iter().filter(|(request, _)| *request == RequestId(id));
            assert_eq!(of_request.map(|(_, tokens)| tokens).sum::<u32>(), max_new);
        }
    }
}

#[test]
fn a_step_is_not_repeated_while_a_request_waits_for_a_plan() {
    let config = Config::builder().page_size(16).device_pages(2).build();
    let mut config = config.expect("it can work");
    config.batch.repeats_max = 100;
    config.batch.decode_reserve_pages = 0;
    let mut scheduler = Scheduler::new(config).expect("it can work");
    scheduler.submit(Time(0), Request::new(1, vec![1; 17], 9)).expect("a sound request");
    let prefill = scheduler.plan(Time(0));
    assert_eq!((prefill.prefills.len(), prefill.repeats_max), (1, 0));
    let results = [StepResult { request: RequestId(1), tokens: &[9], finished: false }];
    let event =
        Event::StepDone { step: prefill.step.expect("a step"), results: &results, failed: &[] };
    scheduler.advance(Time(1), event).expect("it fits");
    let alone = scheduler.plan(Time(1));
    assert_eq!((alone.decodes.len(), alone.repeats_max), (1, 7), "eight tokens are left");
    let step = alone.step.expect("a step");
    scheduler
        .advance(Time(2), Event::StepDone { step, results: &results, failed: &[] })
        .expect("it fits");
    scheduler.submit(Time(2), Request::new(2, vec![2; 17], 9)).expect("a sound request");
    let crowded = scheduler.plan(Time(2));
    assert_eq!((crowded.decodes.len(), crowded.prefills.len()), (1, 0), "there is no room");
    assert_eq!(crowded.repeats_max, 0);
    assert_eq!(scheduler.stats().steps, 3);
}

/// Plans and performs one step in which everybody who is to produces a token.
fn step(scheduler: &mut Scheduler, now: Time) -> Plan {
    let plan = scheduler.plan(now);
    let last_chunks = plan.prefills.iter().filter(|prefill| prefill.produces_token);
    let decodes = plan.decodes.iter().map(|decode| decode.request);
    let requests = last_chunks.map(|prefill| prefill.request).chain(decodes);
    let results: Vec<_> =
        requests.map(|request| StepResult { request, tokens: &[9], finished: false }).collect();
    let event =
        Event::StepDone { step: plan.step.expect("a step"), results: &results, failed: &[] };
    scheduler.advance(now, event).expect("it fits");
    scheduler.audit();
    plan
}

#[test]
fn a_request_that_computes_its_prompt_takes_no_hits() {
    let mut scheduler = scheduler();
    let prompt: Vec<u32> = (1..=14).collect();
    let computes_prompt =
        |id| Request { computes_prompt: true, ..Request::new(id, (1..=14).collect(), 1) };
    scheduler.submit(Time(0), Request::new(1, prompt.clone(), 1)).expect("a sound request");
    step(&mut scheduler, Time(0));
    scheduler.plan(Time(1));
    let cached = scheduler.cached(&prompt, "", "");
    let before = scheduler.stats().cache;
    assert_eq!(cached.device_pages, 3);

    scheduler.submit(Time(2), computes_prompt(2)).expect("a sound request");
    let plan = step(&mut scheduler, Time(2));
    assert_eq!((plan.prefills[0].start, plan.prefills[0].tokens), (0, 14), "all of it");
    scheduler.plan(Time(3));
    assert_eq!(scheduler.stats().device_hit_tokens, 0);
    assert_eq!(scheduler.stats().cache, before, "its pages were there already");

    scheduler.submit(Time(4), Request::new(3, prompt.clone(), 1)).expect("a sound request");
    let plan = step(&mut scheduler, Time(4));
    assert_eq!((plan.prefills[0].start, plan.prefills[0].tokens), (12, 2));

    // If it is first, others use its pages, and it waits for no other request.
    scheduler.plan(Time(5));
    scheduler.clear_cache();
    scheduler.submit(Time(6), Request::new(4, prompt.clone(), 1)).expect("a sound request");
    scheduler.submit(Time(6), computes_prompt(5)).expect("a sound request");
    let plan = step(&mut scheduler, Time(6));
    assert_eq!(plan.prefills.iter().map(|prefill| prefill.tokens).collect::<Vec<_>>(), [14, 14]);
    scheduler.plan(Time(7));
    assert_eq!(scheduler.stats().cache, before);
    assert_eq!(scheduler.cached(&prompt, "", ""), cached);
}

#[test]
fn computes_prompt_is_serialized_only_if_set() {
    let plain = Request::new(1, vec![1], 1);
    let written = serde_json::to_string(&plain).expect("it can be written");
    assert!(!written.contains("computes_prompt"), "{written}");
    let computes = Request { computes_prompt: true, ..plain };
    let written = serde_json::to_string(&computes).expect("it can be written");
    assert_eq!(serde_json::from_str::<Request>(&written).expect("it can be read"), computes);
}
