//! Waits that a request makes once before an admission.

use crate::producers::SharedWait;

/// Waits that a request makes once before an admission, and then no longer.
#[derive(Debug, Default)]
pub(crate) struct Patience {
    for_producer: Option<SharedWait>,
    for_room: bool,
    for_share: bool,
}

impl Patience {
    /// Sets the wait for pages of a producer; `None` allows another one.
    pub(crate) fn set_for_producer(&mut self, wait: Option<SharedWait>) {
        self.for_producer = wait;
    }

    /// Notes whether the request has waited for write-backs that make room.
    pub(crate) fn set_for_room(&mut self, waited: bool) {
        self.for_room = waited;
    }

    /// Notes that the request has waited for a share of the load-backs until its timer ran out.
    pub(crate) fn end_for_share(&mut self) {
        self.for_share = true;
    }

    /// Wait for pages of a producer.
    pub(crate) fn for_producer(&self) -> Option<SharedWait> {
        self.for_producer
    }

    /// Returns true if the request has waited for write-backs that make room.
    pub(crate) fn for_room(&self) -> bool {
        self.for_room
    }

    /// Returns true if the request has waited for a share of the load-backs until its timer ran out.
    pub(crate) fn for_share(&self) -> bool {
        self.for_share
    }
}
