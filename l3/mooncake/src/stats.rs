//! Statistics of a cluster.

use serde::Serialize;
use terrace_l3::Figure;

use crate::codes::OutcomeCount;

/// Statistics of a Mooncake cluster.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct MooncakeStats {
    /// True if the cluster has been reached.
    pub is_connected: bool,
    /// Objects removed here that the cluster has not removed yet.
    pub leaving: u64,
    /// Calls that wait for a thread.
    pub waiting: u64,
    /// Pages of failed transfers that the library may still access, and that are reserved
    /// meanwhile.
    pub quarantined: u64,
    /// Number of objects by call and outcome.
    pub outcomes: Vec<OutcomeCount>,
}

impl MooncakeStats {
    /// Metrics of these statistics.
    #[must_use]
    pub fn figures(&self) -> Vec<Figure> {
        let counts = |name, help, call| {
            let of_call = self.outcomes.iter().filter(|it| it.call == call);
            Figure::counters(name, help, "outcome", of_call.map(|it| (it.outcome, it.count)))
        };
        vec![
            Figure::gauge(
                "terrace_mooncake_connected",
                "1 after the Mooncake cluster has been reached.",
                u64::from(self.is_connected),
            ),
            Figure::gauge(
                "terrace_mooncake_waiting",
                "Calls that wait for a thread.",
                self.waiting,
            ),
            Figure::gauge(
                "terrace_mooncake_quarantined",
                "Pages of failed transfers that the library may still write to.",
                self.quarantined,
            ),
            Figure::gauge(
                "terrace_mooncake_leaving",
                "Objects removed here that the cluster has not freed yet.",
                self.leaving,
            ),
            counts(
                "terrace_mooncake_put_total",
                "Objects of put calls, by result code of the cluster.",
                "put",
            ),
            counts(
                "terrace_mooncake_get_total",
                "Objects of get calls, by result code of the cluster.",
                "get",
            ),
            counts(
                "terrace_mooncake_exists_total",
                "Objects of exists calls, by result code of the cluster.",
                "exists",
            ),
            counts(
                "terrace_mooncake_remove_total",
                "Objects of remove calls, by result code of the cluster.",
                "remove",
            ),
        ]
    }
}
