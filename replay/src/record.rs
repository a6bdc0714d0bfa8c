//! Recording of a live scheduler: its traffic as a trace ([`TrafficRecorder`]), or all of its
//! calls, to be repeated and compared ([`DecisionRecorder`], [`check_decisions`]).

mod decisions;
mod lines;
mod traffic;

pub use decisions::{
    Checked, DecisionError, DecisionRecorder, Difference, Refusal, check_decisions,
};
pub use traffic::TrafficRecorder;
