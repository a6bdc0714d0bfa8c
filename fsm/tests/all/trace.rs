//! Traces can be written down, read again and checked.

use terrace_fsm::{EventName, RequestId, StateName, Time, Transition, replay};

fn transition(request: u64, from: StateName, event: EventName) -> Transition {
    let to = from.after(event).expect("legal");
    Transition { at: Time(0), request: RequestId(request), from, event, to }
}

fn two_lives() -> Vec<Transition> {
    vec![
        transition(1, StateName::Submitted, EventName::Admitted),
        transition(2, StateName::Submitted, EventName::PrefetchStarted),
        transition(1, StateName::Prefilling, EventName::PrefillEnded),
        transition(2, StateName::Prefetching, EventName::Abort),
        transition(1, StateName::Decoding, EventName::Completed),
    ]
}

#[test]
fn a_trace_round_trips_through_json() {
    let trace = two_lives();
    let text = serde_json::to_string(&trace).expect("plain data");
    let read: Vec<Transition> = serde_json::from_str(&text).expect("what was written");
    assert_eq!(read, trace);
    let states = replay(read).expect("legal");
    assert_eq!(states[&RequestId(1)], StateName::Draining);
    assert_eq!(states[&RequestId(2)], StateName::Aborted);
}

#[test]
fn a_trace_with_a_gap_is_rejected() {
    let mut trace = two_lives();
    trace.remove(2);
    let error = replay(trace).expect_err("r1 cannot decode before it has prefilled");
    assert_eq!(error.index, 3);
}

#[test]
fn a_transition_to_the_wrong_state_is_rejected() {
    let mut trace = two_lives();
    trace[0].to = StateName::Decoding;
    let error = replay(trace).expect_err("admission leads to prefilling").to_string();
    assert_eq!(error, "transition 0 of the trace is illegal: r1 Submitted -> Decoding (Admitted)");
}

#[test]
fn an_id_may_be_reused_after_its_end() {
    let life = [transition(1, StateName::Submitted, EventName::Abort)];
    assert!(replay(life.into_iter().chain(life)).is_ok());
}
