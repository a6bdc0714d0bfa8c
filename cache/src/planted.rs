//! Bugs that can be planted, to prove that the simulator finds them.
//!
//! Without the feature `planted`, which only the tests turn on, [`planted`] is always false and the
//! compiler removes every trace of this.

use std::fmt::{self, Write};

/// A small change of behaviour that must not go unnoticed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[expect(missing_docs, reason = "the names say it")]
pub enum Bug {
    SkipTokenCompare,
    PublishFailedTransfer,
    EvictParentFirst,
    EvictPinnedDevicePages,
    EvictPinnedHostPages,
    LengthenSharedNode,
    KeepKeyOfRemovedNode,
    LeaveSaltOutOfNamespace,
    LeavePrefixOutOfKey,
    KeepRowOfRetracted,
    MiscountEvictablePages,
    MergeAcrossPins,
    LeakPinOnAbort,
    LosePagesOnCompletion,
    BelieveWholeLoadBack,
    FetchFromPageZero,
    UseKeysOfTheProbe,
    UnpinDuringBackup,
    DropBudgetOfLateOperation,
    BelieveBestRank,
    ReuseAfterTimeout,
    PublishUncomputedPage,
    BelieveFailedStep,
    KeepRowOfDuplicate,
    KeepSharingAfterEnd,
    BelieveDrafts,
    LoseSlotOnRetraction,
    BelieveWholePrefetch,
    CountRankTwice,
    GrowOnePageTooLate,
    TrustCorruptHostCopy,
    ReuseAfterDeadline,
    StarveTheShort,
    NeverTakeOver,
    NeverShare,
    ProbeOnce,
    NeverProbe,
    NeverPrefetch,
    NeverLoadBack,
    ForgetBackup,
    DropWriteBacks,
    WaitOutDeadlines,
    RankByAdmission,
    InheritPriority,
    BackOffForGood,
    MissingForGood,
    CallOffBestEffort,
    EvictLatestFirst,
    FetchFewPages,
    /// Device pages are handed out again though a step in flight may still write to them.
    ReuseBeforeLaterStep,
    /// Results of a step behind a failed one are trusted.
    BelieveStepBehindFailed,
    /// A decode is told to start from another row's token.
    InputOfAnotherRow,
    PriceOutForGood,
    /// The content of a passage is not part of the keys.
    LeaveContentOutOfKey,
    /// Pages of the same tokens count as the same, whatever they stand for.
    SkipContentCompare,
    /// A step ends wherever its tokens do.
    CutPassages,
    /// Hits are taken from tiers that the request does not read.
    ReadBeyondReach,
    /// Pages go to tiers that no request wanted them written to.
    WriteBeyondReach,
    /// Pages of a request that writes nothing are published.
    PublishUnwritten,
    /// More adapters run than may.
    TooManyAdapters,
    /// Plans do not say which adapter to compute with.
    ForgetAdapter,
    /// Requests that live while the weights are replaced keep the keys of the old ones.
    KeepOldKeys,
    /// Routers are not told of pages that are evicted from the end of a node.
    ForgetRemovedEvent,
    /// Routers are told that pages begin a sequence which are in its middle.
    WrongParentInEvent,
    /// Events that there was no room for leave no gap in the numbers.
    HideLostEvents,
    /// Each of several answers to a prompt computes all of it.
    AnswersApart,
    /// Pages that a driver did not fetch because no request waited count as missing in L3.
    CalledOffIsMissing,
    /// Results that a step computed from a failed load-back are trusted.
    TrustStepOnFailedLoad,
    /// Pages that a step reads while they are loaded are published when it has ended.
    PublishWhileLoading,
    /// Plans do not name the load-back that a prefill waits for.
    ForgetAwaitedLoadBack,
    /// A model waits for the first layer of a load-back, and reads the others before they came.
    WaitForFirstLayerOnly,
    /// Pages that are on their way while the weights are replaced are kept.
    KeepPagesOfOldWeights,
    /// Host pages are made free only if there is room for all that were asked for.
    HostRoomAllOrNothing,
    /// A request that waits too long for a share of the prefetches loses what L3 has of it.
    ForgetHitsAtTimeout,
    /// A prefetch begins only when the share has room for all of it.
    WaitForWholeShare,
    /// A request fetches one piece of what L3 has of it, and computes the rest.
    FetchOnePiece,
    /// A request that once waited for copies preempts no other until their time is over.
    LateRoomBlocksPreemption,
    /// Deferred requests occupy the admission window.
    DeferredFillWindow,
    /// The time that a transfer waits behind others counts as its own.
    PriceQueueing,
    /// A shared load-back is not seen as progress.
    StallDuringSharedLoad,
}

impl Bug {
    /// Every bug that can be planted.
    pub const ALL: [Bug; 80] = [
        Self::SkipTokenCompare,
        Self::PublishFailedTransfer,
        Self::EvictParentFirst,
        Self::EvictPinnedDevicePages,
        Self::EvictPinnedHostPages,
        Self::LengthenSharedNode,
        Self::KeepKeyOfRemovedNode,
        Self::LeaveSaltOutOfNamespace,
        Self::LeavePrefixOutOfKey,
        Self::KeepRowOfRetracted,
        Self::MiscountEvictablePages,
        Self::MergeAcrossPins,
        Self::LeakPinOnAbort,
        Self::LosePagesOnCompletion,
        Self::BelieveWholeLoadBack,
        Self::FetchFromPageZero,
        Self::UseKeysOfTheProbe,
        Self::UnpinDuringBackup,
        Self::DropBudgetOfLateOperation,
        Self::BelieveBestRank,
        Self::ReuseAfterTimeout,
        Self::PublishUncomputedPage,
        Self::BelieveFailedStep,
        Self::KeepRowOfDuplicate,
        Self::KeepSharingAfterEnd,
        Self::BelieveDrafts,
        Self::LoseSlotOnRetraction,
        Self::BelieveWholePrefetch,
        Self::CountRankTwice,
        Self::GrowOnePageTooLate,
        Self::TrustCorruptHostCopy,
        Self::ReuseAfterDeadline,
        Self::StarveTheShort,
        Self::NeverTakeOver,
        Self::NeverShare,
        Self::ProbeOnce,
        Self::NeverProbe,
        Self::NeverPrefetch,
        Self::NeverLoadBack,
        Self::ForgetBackup,
        Self::DropWriteBacks,
        Self::WaitOutDeadlines,
        Self::RankByAdmission,
        Self::InheritPriority,
        Self::BackOffForGood,
        Self::MissingForGood,
        Self::CallOffBestEffort,
        Self::EvictLatestFirst,
        Self::FetchFewPages,
        Self::ReuseBeforeLaterStep,
        Self::BelieveStepBehindFailed,
        Self::InputOfAnotherRow,
        Self::PriceOutForGood,
        Self::LeaveContentOutOfKey,
        Self::SkipContentCompare,
        Self::CutPassages,
        Self::ReadBeyondReach,
        Self::WriteBeyondReach,
        Self::PublishUnwritten,
        Self::TooManyAdapters,
        Self::ForgetAdapter,
        Self::KeepOldKeys,
        Self::ForgetRemovedEvent,
        Self::WrongParentInEvent,
        Self::HideLostEvents,
        Self::AnswersApart,
        Self::CalledOffIsMissing,
        Self::TrustStepOnFailedLoad,
        Self::PublishWhileLoading,
        Self::ForgetAwaitedLoadBack,
        Self::WaitForFirstLayerOnly,
        Self::KeepPagesOfOldWeights,
        Self::HostRoomAllOrNothing,
        Self::ForgetHitsAtTimeout,
        Self::WaitForWholeShare,
        Self::FetchOnePiece,
        Self::LateRoomBlocksPreemption,
        Self::DeferredFillWindow,
        Self::PriceQueueing,
        Self::StallDuringSharedLoad,
    ];
}

impl fmt::Display for Bug {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (place, letter) in format!("{self:?}").char_indices() {
            if place > 0 && letter.is_ascii_uppercase() {
                f.write_char('-')?;
            }
            f.write_char(letter.to_ascii_lowercase())?;
        }
        Ok(())
    }
}

#[cfg(feature = "planted")]
thread_local! {
    static PLANTED: std::cell::Cell<Option<Bug>> = const { std::cell::Cell::new(None) };
}

/// Plants a bug in this thread, or none.
#[cfg(feature = "planted")]
pub fn plant(bug: Option<Bug>) {
    PLANTED.set(bug);
}

/// Returns true if this bug is planted.
#[cfg(feature = "planted")]
#[must_use]
pub fn planted(bug: Bug) -> bool {
    PLANTED.get() == Some(bug)
}

/// Returns false: no bug is planted.
#[cfg(not(feature = "planted"))]
#[must_use]
#[inline(always)]
pub const fn planted(_: Bug) -> bool {
    false
}
