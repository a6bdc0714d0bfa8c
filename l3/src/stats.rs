//! What a store tells about itself.

use std::borrow::Cow;

use serde::Serialize;

/// Counters since the start and gauges of the moment. What a backend or wrapper does not have is
/// `None`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct StoreStats {
    /// The memory backend, or the upper tier.
    pub memory: Option<TierStats>,
    /// The disk backend, or the lower tier.
    pub disk: Option<TierStats>,
    /// What this client has put into a cluster.
    pub remote: Option<TierStats>,
    /// What only this kind of backend has to tell.
    pub figures: Vec<Figure>,
    /// Deadlines, breaker, negative cache.
    pub guard: Option<GuardStats>,
    /// Freeing of consumed objects.
    pub release: Option<ReleaseStats>,
}

impl StoreStats {
    /// The value of a figure whose label says `of`.
    #[must_use]
    pub fn figure(&self, name: &str, of: &str) -> Option<u64> {
        let figure = self.figures.iter().find(|figure| figure.name == name)?;
        figure.values.iter().find(|(label, _)| label == of).map(|(_, value)| *value)
    }
}

/// Something that a backend measures, as it is told to whoever collects metrics.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Figure {
    /// Its name, as metrics are called.
    pub name: &'static str,
    /// What it is.
    pub help: &'static str,
    /// Whether it only grows.
    pub kind: FigureKind,
    /// What its values are told apart by; empty for a single value.
    pub label: &'static str,
    /// The values, each with that of the label.
    pub values: Vec<(Cow<'static, str>, u64)>,
}

/// How a figure changes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum FigureKind {
    /// It only grows.
    Counter,
    /// It goes up and down.
    Gauge,
}

impl Figure {
    /// A single value that only grows.
    #[must_use]
    pub fn counter(name: &'static str, help: &'static str, value: u64) -> Self {
        Self::counters(name, help, "", [("", value)])
    }

    /// A single value that goes up and down.
    #[must_use]
    pub fn gauge(name: &'static str, help: &'static str, value: u64) -> Self {
        Self::gauges(name, help, "", [("", value)])
    }

    /// Values that only grow, told apart by `label`.
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

    /// Values that go up and down, told apart by `label`.
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

/// One place where objects are kept.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct TierStats {
    /// Objects that can be had.
    pub objects: u64,
    /// Their payload.
    pub bytes: u64,
    /// Slots in use, including those that wait to be freed, times their payload size.
    pub resident_bytes: u64,
    /// What all slots could hold.
    pub capacity_bytes: u64,
    /// Payload size of a slot, which an object takes however small it is; 0 if it is not known.
    pub slot_bytes: u64,
    /// Memory that the index takes.
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
    /// Objects asked about.
    pub exists: u64,
    /// Leases granted.
    pub leases: u64,
    /// Leases asked for and not granted, because too much was leased already.
    pub leases_refused: u64,
    /// Objects evicted.
    pub evicted: u64,
    /// Objects removed on demand.
    pub removed: u64,
    /// Objects replaced by a later generation.
    pub superseded: u64,
    /// Objects that did not verify, and were removed.
    pub corrupt: u64,
    /// Transfers that the medium failed.
    pub io_errors: u64,
    /// Bytes that had to be copied on the way because their buffer was not aligned for direct IO.
    pub bounced_bytes: u64,
    /// Rounds that made changes durable.
    pub commits: u64,
    /// Times that the disk had no room for more slots.
    pub disk_full: u64,
    /// 1 when changes cannot be made durable any more, and so none are taken.
    pub broken: u64,
}

/// What a breaker does.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum BreakerState {
    /// All is well; calls go through.
    #[default]
    Closed,
    /// Calls are refused.
    Open,
    /// Single calls go through to see whether all is well again.
    HalfOpen,
}

/// What a guard has seen.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct GuardStats {
    /// The breaker.
    pub breaker: BreakerState,
    /// Times that the breaker opened.
    pub opened: u64,
    /// Calls refused by the breaker.
    pub refused: u64,
    /// Calls that ran into their deadline.
    pub timed_out: u64,
    /// Calls past their deadline that have not ended yet.
    pub overdue: u64,
    /// Objects not asked for because they had failed lately.
    pub negative_hits: u64,
    /// Objects remembered as failing.
    pub negative: u64,
}

/// How freeing of consumed objects goes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct ReleaseStats {
    /// Objects released.
    pub released: u64,
    /// Objects whose removal failed and is being retried.
    pub parked: u64,
    /// The most that were ever parked at once.
    pub parked_most: u64,
    /// Retries.
    pub retries: u64,
    /// Objects removed by a retry.
    pub recovered: u64,
    /// Gets refused because the object was released.
    pub gets_refused: u64,
}
