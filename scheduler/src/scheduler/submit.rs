//! New requests.

use std::collections::BTreeSet;
use std::sync::Arc;

use terrace_cache::Passage;
use terrace_fsm::{RequestId, Time};

use super::Scheduler;
use crate::config::ms;
use crate::error::SubmitError;
use crate::ids::Handle;
use crate::request::{Prompt, Request};
use crate::requests::{Entry, Options};
use crate::wait::Wait;

impl Scheduler {
    /// Adds a request with its [siblings](Request::siblings). The next plan considers them.
    ///
    /// # Errors
    /// If the request or one of its siblings cannot be accepted. Nothing has changed then.
    pub fn submit<P: Prompt>(&mut self, now: Time, request: Request<P>) -> Result<(), SubmitError> {
        let Request { id, prompt, max_new_tokens: max_new, .. } = request;
        let Request { priority, adapter, salt, computes_prompt, waits_for_tokens, .. } = request;
        let (passages, reads, writes) = (request.passages, request.reads, request.writes);
        let siblings = request.siblings;
        self.check_request(id, prompt.tokens() as u64, max_new)?;
        self.check_names(id, &siblings)?;
        self.check_passages(id, &passages, prompt.tokens())?;
        self.now = self.now.max(now);
        let namespace = self.namespace_of(&adapter, &salt);
        let (page_size, now) = (self.config.cache.page_size, self.now);
        let adapter = self.adapters.acquire(adapter);
        let handle = self.requests.insert(|_, handle| {
            let sequence = prompt.hashed(namespace, page_size, &passages);
            let mut entry = Entry::new(id, handle, priority, sequence, max_new, now);
            entry.options = Options { computes_prompt, waits_for_tokens, reads, writes };
            (entry.adapter, entry.salt) = (adapter, salt.into());
            entry
        });
        self.arrivals.observe(now);
        self.on_submitted(handle);
        match &mut self.l3_reads {
            Some(reads) => reads.queue_probe(handle),
            None => self.requests.wait(handle, Wait::ADMISSION),
        }
        if !siblings.is_empty() {
            self.add_siblings(handle, &siblings);
        }
        Ok(())
    }

    /// Adds the other answers to a request's prompt. L3 is probed for the first request only: the others find its
    /// pages in the cache.
    fn add_siblings(&mut self, first: Handle, ids: &[RequestId]) {
        let mut handles = vec![first];
        for &id in ids {
            let handle = self.requests.insert(|known, handle| known[first].sibling(id, handle));
            self.adapters.add_request(self.requests[first].adapter);
            self.on_submitted(handle);
            self.requests.wait(handle, Wait::ADMISSION);
            handles.push(handle);
        }
        let siblings: Arc<[Handle]> = handles.into();
        for &handle in &*siblings {
            self.requests[handle].siblings = Some(siblings.clone());
        }
    }

    fn on_submitted(&mut self, handle: Handle) {
        if self.config.queue.start_timeout_ms > 0 {
            let start_by = self.now.after(ms(self.config.queue.start_timeout_ms));
            self.requests.limit_start(handle, Some(start_by));
        }
        self.stats.submitted += 1;
    }

    fn check_request(
        &self,
        id: RequestId,
        prompt_tokens: u64,
        max_new_tokens: u32,
    ) -> Result<(), SubmitError> {
        if prompt_tokens == 0 {
            return Err(SubmitError::EmptyPrompt(id));
        }
        // The KV of the last token that is produced is never needed.
        let tokens = prompt_tokens + u64::from(max_new_tokens.saturating_sub(1));
        let needed_pages = tokens.div_ceil(self.config.cache.page_size.into());
        let device_pages = self.config.cache.device_pages;
        if needed_pages > device_pages.into() || tokens > u64::from(u32::MAX / 2) {
            return Err(SubmitError::NeverFits { request: id, needed_pages, device_pages });
        }
        Ok(())
    }

    /// Checks that there is a place for each of these requests, and that all ids are new.
    fn check_names(&self, id: RequestId, siblings: &[RequestId]) -> Result<(), SubmitError> {
        if self.requests.knows(id) {
            return Err(SubmitError::DuplicateId(id));
        }
        // Ended requests count until a plan has reported their end.
        let requests_max = self.config.queue.requests_max;
        let others = self.requests.len() + self.notices.unreported_ends() + siblings.len();
        if others >= requests_max as usize {
            return Err(SubmitError::QueueFull { requests_max });
        }
        if siblings.is_empty() {
            return Ok(());
        }
        let mut names = BTreeSet::from([id]);
        match siblings.iter().find(|&&name| self.requests.knows(name) || !names.insert(name)) {
            Some(&taken) => Err(SubmitError::DuplicateId(taken)),
            None => Ok(()),
        }
    }

    fn check_passages(
        &self,
        request: RequestId,
        passages: &[Passage],
        prompt_tokens: usize,
    ) -> Result<(), SubmitError> {
        let checked = Passage::check_all(passages, prompt_tokens);
        checked.map_err(|error| SubmitError::BadPassage { request, error })?;
        let tokens_max = self.config.batch.passage_tokens_max();
        let whole = passages.iter().filter(|passage| passage.is_whole).map(Passage::len);
        match whole.max() {
            Some(tokens) if tokens > tokens_max => {
                Err(SubmitError::PassageTooLong { request, tokens, tokens_max })
            }
            Some(_) | None => Ok(()),
        }
    }
}
