//! Statistics of a store.

use std::borrow::Cow;

use serde::Serialize;

/// Counters since the start and current gauges. Parts that a backend or wrapper does not have are
/// `None`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct StoreStats {
    /// The memory backend, or the upper tier.
    pub memory: Option<TierStats>,
    /// The disk backend, or the lower tier.
    pub disk: Option<TierStats>,
    /// Objects that this client has put into a cluster.
    pub remote: Option<TierStats>,
    /// Figures of this kind of backend only.
    pub figures: Vec<Figure>,
    /// Deadlines, breaker, negative cache.
    pub guard: Option<GuardStats>,
}

impl StoreStats {
    /// Value of a figure with the label value `of`.
    #[must_use]
    pub fn figure(&self, name: &str, of: &str) -> Option<u64> {
        let figure = self.figures.iter().find(|figure| figure.name == name)?;
        figure.values.iter().find(|(label, _)| label == of).map(|(_, value)| *value)
    }
}

/// A metric of one backend, exported as it is.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Figure {
    /// Name of the metric.
    pub name: &'static str,
    /// Description.
    pub help: &'static str,
    /// Counter or gauge.
    pub kind: FigureKind,
    /// Name of the label; empty for a single value.
    pub label: &'static str,
    /// The values, each with the value of its label.
    pub values: Vec<(Cow<'static, str>, u64)>,
}

/// Kind of a figure.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum FigureKind {
    /// Only grows.
    Counter,
    /// Goes up and down.
    Gauge,
}

impl Figure {
    /// Creates a counter with a single value.
    #[must_use]
    pub fn counter(name: &'static str, help: &'static str, value: u64) -> Self {
        Self::counters(name, help, "", [("", value)])
    }

    /// Creates a gauge with a single value.
    #[must_use]
    pub fn gauge(name: &'static str, help: &'static str, value: u64) -> Self {
        Self::gauges(name, help, "", [("", value)])
    }

    /// Creates counters that differ in the value of `label`.
    #[must_use]
    pub fn counters<L: Into<Cow<'static, str>>>(
        name: &'static str,
        help: &'static str,
        label: &'static str,
        values: impl IntoIterator<Item = (L, u64)>,
    ) -> Self {
        let values = values.into_iter().map(|(of, value)| (of.into(), value)).collect();
        Self { name, help, kind: FigureKind::Counter, label, values }
    }

    /// Creates gauges that differ in the value of `label`.
    #[must_use]
    pub fn gauges<L: Into<Cow<'static, str>>>(
        name: &'static str,
        help: &'static str,
        label: &'static str,
        values: impl IntoIterator<Item = (L, u64)>,
    ) -> Self {
        Self { kind: FigureKind::Gauge, ..Self::counters(name, help, label, values) }
    }
}

/// Statistics of one tier.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct TierStats {
    /// Objects that can be read.
    pub objects: u64,
    /// Payload of these objects.
    pub bytes: u64,
    /// Slots in use, including those that wait to be freed, times their payload size.
    pub resident_bytes: u64,
    /// Payload that all slots could hold.
    pub capacity_bytes: u64,
    /// Payload size of a slot, which an object takes however small it is; 0 if unknown.
    pub slot_bytes: u64,
    /// Memory of the index.
    pub index_bytes: u64,
    /// Arenas registered.
    pub arenas: u64,
    /// Objects with a hard pin.
    pub hard_pinned: u64,
    /// Objects with a soft pin.
    pub soft_pinned: u64,
    /// Objects stored.
    pub puts: u64,
    /// Puts of objects that were there already.
    pub puts_already_there: u64,
    /// Puts refused because nothing could be evicted.
    pub puts_full: u64,
    /// Payload stored.
    pub put_bytes: u64,
    /// Objects read.
    pub gets: u64,
    /// Gets of objects that were not there.
    pub gets_missing: u64,
    /// Payload read.
    pub get_bytes: u64,
    /// Objects looked up.
    pub exists: u64,
    /// Leases granted.
    pub leases: u64,
    /// Leases refused because too many were active.
    pub leases_refused: u64,
    /// Objects evicted.
    pub evicted: u64,
    /// Objects removed by request.
    pub removed: u64,
    /// Objects replaced by a later generation.
    pub superseded: u64,
    /// Objects that did not verify and were removed.
    pub corrupt: u64,
    /// Transfers that the medium failed.
    pub io_errors: u64,
    /// Bytes copied because their buffer was not suitable for a direct transfer.
    pub bounced_bytes: u64,
    /// Commits that made changes durable.
    pub commits: u64,
    /// Times that the disk had no room for more slots.
    pub disk_full: u64,
    /// 1 after a failure to make changes durable; further changes are refused.
    pub broken: u64,
}

/// State of a circuit breaker.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum BreakerState {
    /// Healthy; calls are admitted.
    #[default]
    Closed,
    /// Calls are refused.
    Open,
    /// Single calls are admitted as probes.
    HalfOpen,
}

/// Statistics of a guard.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct GuardStats {
    /// State of the breaker.
    pub breaker: BreakerState,
    /// Times that the breaker opened.
    pub opened: u64,
    /// Calls refused by the breaker.
    pub refused: u64,
    /// Calls that ran into their deadline.
    pub timed_out: u64,
    /// Calls past their deadline that are still running.
    pub overdue: u64,
    /// Objects not requested because they failed recently.
    pub negative_hits: u64,
    /// Objects remembered as failing.
    pub negative: u64,
}
