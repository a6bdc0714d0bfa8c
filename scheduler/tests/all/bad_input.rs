//! Bad input gets an error that says what to do, and changes nothing.

use terrace_scheduler::{
    Config, ContentKey, Event, EventError, L3Config, OpId, Outcome, Passage, Request, RequestId,
    Scheduler, StepId, StepResult, SubmitError, Time, UnknownRequest,
};

fn scheduler() -> Scheduler {
    let config = Config::builder()
        .page_size(4)
        .device_pages(8)
        .host_pages(8)
        .l3(L3Config { prefetch_threshold_pages: 1, ..L3Config::default() })
        .ranks(2)
        .build();
    Scheduler::new(config.expect("it can work")).expect("it can work")
}

fn request(id: u64, prompt: u32, max_new_tokens: u32) -> Request {
    Request::new(id, (0..prompt).collect(), max_new_tokens)
}

/// Does something to the scheduler that must fail and leave no trace.
fn refused<T: std::fmt::Debug, E>(
    scheduler: &mut Scheduler,
    attempt: impl FnOnce(&mut Scheduler) -> Result<T, E>,
) -> E {
    let before = format!("{scheduler:?}");
    let Err(error) = attempt(scheduler) else { panic!("it was accepted") };
    assert_eq!(format!("{scheduler:?}"), before, "a refused input left a trace");
    scheduler.audit();
    error
}

#[test]
fn invalid_requests_are_rejected() {
    let mut scheduler = scheduler();
    scheduler.submit(Time(0), request(1, 8, 4)).expect("a sound request");
    let mut submit = |request| {
        refused(&mut scheduler, |scheduler| scheduler.submit(Time(5), request)).to_string()
    };
    assert_eq!(submit(request(2, 0, 4)), "r2 has an empty prompt: give it at least one token");
    assert_eq!(
        submit(request(1, 4, 4)),
        "r1 already exists: an id must be unique until a plan has reported its end"
    );
    assert_eq!(
        submit(request(2, 33, 1)),
        "r2 needs 9 device pages, but there are only 8: shorten the prompt, lower max_new_tokens or \
         raise cache.device_pages"
    );
    assert!(submit(request(2, 4, u32::MAX)).starts_with("r2 needs"), "no overflow");
}

#[test]
fn the_largest_request_that_fits_is_accepted() {
    let mut scheduler = scheduler();
    let error = refused(&mut scheduler, |s| s.submit(Time(0), request(1, 30, 4)));
    let expected =
        SubmitError::NeverFits { request: RequestId(1), needed_pages: 9, device_pages: 8 };
    assert_eq!(error, expected);
    scheduler.submit(Time(0), request(1, 30, 3)).expect("the last token needs no KV");
}

#[test]
fn a_full_queue_rejects_requests() {
    let mut config = Config::default();
    config.queue.requests_max = 1;
    let mut scheduler = Scheduler::new(config).expect("it can work");
    scheduler.submit(Time(0), request(1, 8, 4)).expect("the queue is empty");
    let error = refused(&mut scheduler, |s| s.submit(Time(0), request(2, 8, 4)));
    assert_eq!(error, SubmitError::QueueFull { requests_max: 1 });
}

#[test]
fn one_invalid_sibling_rejects_all() {
    let mut config = Config::default();
    config.queue.requests_max = 4;
    let mut scheduler = Scheduler::new(config).expect("it can work");
    scheduler.submit(Time(0), request(1, 8, 4)).expect("a sound request");
    let answers = |id, prompt, siblings: &[u64]| Request {
        adapter: "lora".to_owned(),
        siblings: siblings.iter().copied().map(RequestId).collect(),
        ..request(id, prompt, 4)
    };
    let mut submit = |request| refused(&mut scheduler, |s| s.submit(Time(5), request));
    assert_eq!(submit(answers(2, 8, &[3, 1])), SubmitError::DuplicateId(RequestId(1)));
    assert_eq!(submit(answers(2, 8, &[3, 3])), SubmitError::DuplicateId(RequestId(3)));
    assert_eq!(submit(answers(2, 8, &[2])), SubmitError::DuplicateId(RequestId(2)));
    assert_eq!(submit(answers(1, 8, &[2])), SubmitError::DuplicateId(RequestId(1)));
    let full = SubmitError::QueueFull { requests_max: 4 };
    assert_eq!(submit(answers(2, 8, &[3, 4, 5])), full);
    assert_eq!(submit(answers(2, 0, &[3])), SubmitError::EmptyPrompt(RequestId(2)));
    scheduler.submit(Time(5), answers(2, 8, &[3, 4])).expect("there are three places");
    scheduler.audit();
}

#[test]
fn unknown_requests_cannot_be_aborted() {
    let mut scheduler = scheduler();
    let error = refused(&mut scheduler, |s| s.abort(Time(0), RequestId(9)));
    assert_eq!(error, UnknownRequest(RequestId(9)));
}

#[test]
fn unknown_operations_and_steps_are_rejected() {
    let mut scheduler = scheduler();
    let report = |op, rank, outcome| Event::Operation { op: OpId(op), rank, outcome };
    let mut refuse = |event| refused(&mut scheduler, |s| s.advance(Time(0), event));
    assert_eq!(refuse(report(0, 0, Outcome::Done)), EventError::UnknownOperation(OpId(0)));
    let step = StepId(0);
    assert_eq!(refuse(Event::StepFailed { step }), EventError::UnknownStep(step));
    assert_eq!(
        refuse(Event::StepDone { step, results: &[], failed: &[] }),
        EventError::UnknownStep(step)
    );
}

#[test]
fn invalid_outcomes_are_rejected() {
    let mut scheduler = scheduler();
    scheduler.submit(Time(0), request(1, 9, 4)).expect("a sound request");
    let plan = scheduler.plan(Time(0));
    let op = plan.l3[0].op;
    let mut refuse = |rank, outcome| {
        refused(&mut scheduler, |s| s.advance(Time(0), Event::Operation { op, rank, outcome }))
    };
    assert_eq!(refuse(2, Outcome::Done), EventError::UnknownRank { op, rank: 2, ranks: 2 });
    assert_eq!(
        refuse(0, Outcome::Partial(3)),
        EventError::TooManyPages { op, pages: 2, claimed: 3 }
    );
}

#[test]
fn invalid_results_are_rejected() {
    let mut config = Config::builder().page_size(4).device_pages(8).build().expect("it can work");
    config.batch.step_tokens_max = 300;
    let mut scheduler = Scheduler::new(config).expect("it can work");
    scheduler.submit(Time(0), request(1, 9, 4)).expect("a sound request");
    let step = scheduler.plan(Time(0)).step.expect("there is a prompt to compute");
    let result = |id, tokens| StepResult { request: RequestId(id), tokens, finished: false };
    let mut refuse = |results: &[StepResult<'_>]| {
        refused(&mut scheduler, |s| {
            s.advance(Time(1), Event::StepDone { step, results, failed: &[] })
        })
    };
    let request = RequestId(1);
    assert_eq!(refuse(&[]), EventError::MissingResult { step, request });
    assert_eq!(
        refuse(&[result(1, &[5]), result(2, &[5])]),
        EventError::UnexpectedResult { step, request: RequestId(2) }
    );
    assert_eq!(
        refuse(&[result(1, &[5]), result(1, &[5])]),
        EventError::UnexpectedResult { step, request }
    );
    for tokens in [&[][..], &[5, 6][..]] {
        let error = refuse(&[result(1, tokens)]);
        let tokens = tokens.len();
        assert_eq!(error, EventError::WrongTokenCount { request, tokens, tokens_max: 1 });
    }
    let results = [result(1, &[5])];
    let event = Event::StepDone { step, results: &results, failed: &[] };
    scheduler.advance(Time(1), event).expect("it fits");
    scheduler.advance(Time(1), event).expect("a repeated report is no error");
    assert_eq!(scheduler.stats().ignored_steps, 1);
    assert_eq!(scheduler.stats().generated_tokens, 1);
}

#[test]
fn steps_end_in_order_and_only_members_may_fail() {
    let mut config = Config::builder().page_size(4).device_pages(8).build().expect("it can work");
    config.batch.steps_in_flight_max = 2;
    let mut scheduler = Scheduler::new(config).expect("it can work");
    scheduler.submit(Time(0), request(1, 9, 4)).expect("a sound request");
    let [first, step] = [0, 1].map(|now| scheduler.plan(Time(now)).step.expect("a step"));
    assert_eq!(scheduler.plan(Time(2)).step, None, "two are in flight");
    let results = [StepResult { request: RequestId(1), tokens: &[5], finished: false }];
    for event in
        [Event::StepFailed { step }, Event::StepDone { step, results: &results, failed: &[] }]
    {
        let error = refused(&mut scheduler, |s| s.advance(Time(3), event));
        assert_eq!(error, EventError::StepOutOfTurn { step, first });
    }
    let failed = &[RequestId(2)];
    let event = Event::StepDone { step: first, results: &results, failed };
    let error = refused(&mut scheduler, |s| s.advance(Time(3), event));
    let request = RequestId(2);
    assert_eq!(error, EventError::UnexpectedResult { step: first, request });
    let event = Event::StepDone { step: first, results: &[], failed: &[RequestId(1)] };
    scheduler.advance(Time(3), event).expect("it fits");
    assert_eq!((scheduler.stats().steps_failed, scheduler.stats().generated_tokens), (0, 0));
}

#[test]
fn too_many_tokens_of_a_repeated_step_are_rejected() {
    let mut config = Config::builder().page_size(4).device_pages(8).build().expect("it can work");
    config.batch.repeats_max = 2;
    let mut scheduler = Scheduler::new(config).expect("it can work");
    scheduler.submit(Time(0), request(1, 4, 9)).expect("a sound request");
    let result = |tokens| [StepResult { request: RequestId(1), tokens, finished: false }];
    let step = scheduler.plan(Time(0)).step.expect("there is a prompt to compute");
    let event = Event::StepDone { step, results: &result(&[5]), failed: &[] };
    scheduler.advance(Time(0), event).expect("it fits");
    let plan = scheduler.plan(Time(1));
    let (step, request) = (plan.step.expect("there is a decode"), RequestId(1));
    assert_eq!(plan.repeats_max, 2);
    let event = Event::StepDone { step, results: &result(&[5; 4]), failed: &[] };
    let error = refused(&mut scheduler, |s| s.advance(Time(2), event));
    assert_eq!(error, EventError::WrongTokenCount { request, tokens: 4, tokens_max: 3 });
    let event = Event::StepDone { step, results: &result(&[5; 2]), failed: &[] };
    scheduler.advance(Time(2), event).expect("fewer will do");
    assert_eq!((scheduler.stats().steps, scheduler.stats().generated_tokens), (3, 3));
}

#[test]
fn late_and_repeated_outcomes_are_counted_and_ignored() {
    let mut scheduler = scheduler();
    scheduler.submit(Time(0), request(1, 9, 4)).expect("a sound request");
    let op = scheduler.plan(Time(0)).l3[0].op;
    let mut report = |rank| {
        let event = Event::Operation { op, rank, outcome: Outcome::Missing };
        scheduler.advance(Time(0), event).expect("the operation was issued");
        scheduler.stats().ignored_outcomes
    };
    assert_eq!([report(0), report(0), report(1), report(1), report(0)], [0, 1, 1, 2, 3]);
}

#[test]
fn invalid_passages_are_rejected() {
    let mut scheduler = scheduler();
    let passage =
        |start, end| Passage { start, end, content: Some(ContentKey(1)), is_whole: false };
    let mut submit = |passages: Vec<Passage>| {
        let request = Request { passages, ..request(1, 8, 1) };
        refused(&mut scheduler, |scheduler| scheduler.submit(Time(5), request)).to_string()
    };
    assert_eq!(submit(vec![passage(2, 2)]), "r1: passage 0, 2..2, has no tokens: leave it out");
    assert_eq!(
        submit(vec![passage(2, 9)]),
        "r1: passage 0, 2..9, ends after the prompt, which has 8 tokens: shorten it"
    );
    assert!(submit(vec![passage(4, 5), passage(0, 2)]).contains("sort passages by their start"));
    assert!(submit(vec![passage(0, 5), passage(4, 6)]).contains("without overlaps"));
}

#[test]
fn a_passage_that_fits_no_step_is_rejected() {
    let mut config = Config::default();
    config.batch.running_max = 4;
    config.batch.step_tokens_max = 10;
    let mut scheduler = Scheduler::new(config).expect("it can work");
    let whole = |end| {
        let passage = Passage { start: 0, end, content: None, is_whole: true };
        Request { passages: vec![passage], ..request(1, 20, 1) }
    };
    let error = refused(&mut scheduler, |s| s.submit(Time(0), whole(8)));
    assert_eq!(
        error.to_string(),
        "r1 has a passage of 8 tokens that may not be split (is_whole), but a step has room for only 7: \
         allow splitting, or raise batch.step_tokens_max"
    );
    scheduler.submit(Time(0), whole(7)).expect("it fits beside three decodes");
}
