//! What an engine may count on when it embeds a scheduler.

use terrace_scheduler::{Config, Event, Plan, Request, RequestId, Scheduler, StepResult, Time};

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
    scheduler.advance(Time(2), Event::StepDone { step, results: &results }).expect("it fits");
    let plan = scheduler.plan(Time(2));
    assert_eq!((plan.decodes.len(), plan.prefills.len()), (1, 1));
}

#[test]
fn a_plan_that_is_used_again_forgets_what_it_said() {
    let mut scheduler = scheduler();
    let mut plan = Plan::default();
    scheduler.submit(Time(0), Request::new(1, vec![1, 2, 3], 4)).expect("a sound request");
    scheduler.plan_into(Time(0), &mut plan);
    assert!(!plan.is_idle());
    scheduler.plan_into(Time(0), &mut plan);
    assert_eq!(plan, Plan::default());
}

#[test]
fn an_id_can_be_used_again_once_its_request_has_ended() {
    let mut scheduler = scheduler();
    for _ in 0..3 {
        scheduler.submit(Time(0), Request::new(1, vec![1, 2, 3], 4)).expect("the id is free");
        scheduler.plan(Time(0));
        scheduler.abort(Time(0), RequestId(1)).expect("it is alive");
        scheduler.audit();
    }
    assert_eq!(scheduler.stats().aborted, 3);
}

#[test]
fn time_that_runs_backwards_is_taken_as_standing_still() {
    let mut scheduler = scheduler();
    scheduler.submit(Time(100), Request::new(1, vec![1, 2, 3], 4)).expect("a sound request");
    assert!(scheduler.plan(Time(5)).step.is_some());
    scheduler.audit();
}
