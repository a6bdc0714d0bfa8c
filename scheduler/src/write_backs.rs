//! Queue of write-backs: paths whose device pages may be copied to host before they are evicted.

use std::collections::VecDeque;

use terrace_cache::{Claims, DevicePin};

use crate::ids::Handle;

/// Paths that are not copied in full, in order of arrival.
#[derive(Debug, Default)]
pub(crate) struct PendingWriteBacks {
    queue: VecDeque<PendingWriteBack>,
    /// Requests that have all their tokens and wait for their copy, started or not.
    draining: u32,
}

/// A path to copy.
#[derive(Debug)]
pub(crate) enum PendingWriteBack {
    /// Path of a request that has all its tokens. The request may have ended.
    Request(Handle),
    /// A path that no request waits for: of a prompt, or of an aborted request.
    Path(DevicePin),
}

impl PendingWriteBacks {
    /// Queues the path of a request that has all its tokens.
    pub(crate) fn push_request(&mut self, handle: Handle) {
        self.draining += 1;
        self.queue.push_back(PendingWriteBack::Request(handle));
    }

    /// Queues a path that no request waits for.
    pub(crate) fn push_path(&mut self, path: DevicePin) {
        self.queue.push_back(PendingWriteBack::Path(path));
    }

    pub(crate) fn pop(&mut self) -> Option<PendingWriteBack> {
        self.queue.pop_front()
    }

    pub(crate) fn first(&self) -> Option<&PendingWriteBack> {
        self.queue.front()
    }

    /// Counts the end of a draining request.
    pub(crate) fn request_ended(&mut self) {
        self.draining -= 1;
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.queue.is_empty()
    }

    pub(crate) fn len(&self) -> usize {
        self.queue.len()
    }

    /// Number of requests that wait for their copy.
    pub(crate) fn draining(&self) -> u32 {
        self.draining
    }

    pub(crate) fn claim(&self, claims: &mut Claims) {
        for pending in &self.queue {
            match pending {
                PendingWriteBack::Request(_) => {}
                PendingWriteBack::Path(path) => claims.device_pin(path),
            }
        }
    }
}
