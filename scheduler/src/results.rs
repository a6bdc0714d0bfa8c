//! Results of a step: lookup by request, and reports that are held back.

use terrace_cache::Token;
use terrace_fsm::{RequestId, Time};

use crate::event::StepResult;

/// Results of a step by request, for results that are not in the order of the plan.
#[derive(Debug, Default)]
pub(crate) struct ResultIndex {
    places: Vec<(RequestId, u32)>,
}

impl ResultIndex {
    pub(crate) fn fill(&mut self, results: &[StepResult<'_>]) {
        self.places.clear();
        self.places.extend(results.iter().zip(0..).map(|(result, place)| (result.request, place)));
        self.places.sort_unstable();
    }

    pub(crate) fn clear(&mut self) {
        self.places.clear();
    }

    /// Result of a request.
    pub(crate) fn find<'r, 't>(
        &self,
        results: &'r [StepResult<'t>],
        request: RequestId,
    ) -> Option<&'r StepResult<'t>> {
        let found = self.places.binary_search_by_key(&request, |&(request, _)| request).ok()?;
        results.get(self.places[found].1 as usize)
    }
}

/// Reader of the results of a step. It searches only for results that are not in the order of the plan.
#[derive(Debug)]
pub(crate) struct ResultReader<'r, 't> {
    results: &'r [StepResult<'t>],
    in_order: &'r [StepResult<'t>],
    index: ResultIndex,
    is_indexed: bool,
}

impl<'r, 't> ResultReader<'r, 't> {
    /// Makes a reader with the memory of `index`; [`into_index`](Self::into_index) returns it.
    pub(crate) fn new(results: &'r [StepResult<'t>], index: ResultIndex) -> Self {
        Self { results, in_order: results, index, is_indexed: false }
    }

    /// Result of the next request that has one.
    #[inline]
    pub(crate) fn next(&mut self, request: RequestId) -> Option<&'r StepResult<'t>> {
        take_next(request, &mut self.in_order).or_else(|| self.search(request))
    }

    #[cold]
    fn search(&mut self, request: RequestId) -> Option<&'r StepResult<'t>> {
        if !self.is_indexed {
            self.index.fill(self.results);
            self.is_indexed = true;
        }
        self.index.find(self.results, request)
    }

    pub(crate) fn into_index(self) -> ResultIndex {
        self.index
    }
}

/// Takes the first result if it is that of the request.
pub(crate) fn take_next<'r, 't>(
    request: RequestId,
    results: &mut &'r [StepResult<'t>],
) -> Option<&'r StepResult<'t>> {
    let (first, rest) = results.split_first()?;
    (first.request == request).then(|| {
        *results = rest;
        first
    })
}

/// Report of a step that is held back until it may take effect.
#[derive(Debug)]
pub(crate) struct Report {
    at: Time,
    /// Results of the step; `None` if it failed.
    done: Option<Done>,
}

/// Owned content of [`Event::StepDone`](crate::Event::StepDone).
#[derive(Debug)]
pub(crate) struct Done {
    results: Vec<(RequestId, Vec<Token>, bool)>,
    failed: Vec<RequestId>,
}

impl Report {
    pub(crate) fn done(at: Time, results: &[StepResult<'_>], failed: &[RequestId]) -> Self {
        let kept =
            |result: &StepResult<'_>| (result.request, result.tokens.to_vec(), result.finished);
        let results = results.iter().map(kept).collect();
        Self { at, done: Some(Done { results, failed: failed.to_vec() }) }
    }

    pub(crate) fn failed(at: Time) -> Self {
        Self { at, done: None }
    }

    /// Time of the report, and the results of the step unless it failed.
    pub(crate) fn into_parts(self) -> (Time, Option<Done>) {
        (self.at, self.done)
    }

    /// Returns true if the step succeeded, and this request's part of it.
    pub(crate) fn succeeded_for(&self, request: RequestId) -> bool {
        self.done.as_ref().is_some_and(|done| !done.failed.contains(&request))
    }

    /// Returns true if later steps produce nothing for the request: its part has failed, or it has all its tokens.
    pub(crate) fn is_last_of(&self, request: RequestId) -> bool {
        let of = |done: &Done| {
            let mut results = done.results.iter();
            done.failed.contains(&request)
                || results.any(|&(its, _, finished)| its == request && finished)
        };
        self.done.as_ref().is_some_and(of)
    }

    /// Returns true if no part of the step has failed.
    pub(crate) fn is_sound(&self) -> bool {
        self.done.as_ref().is_some_and(|done| done.failed.is_empty())
    }
}

impl Done {
    pub(crate) fn results(&self) -> Vec<StepResult<'_>> {
        let results = self.results.iter();
        results
            .map(|&(request, ref tokens, finished)| StepResult { request, tokens, finished })
            .collect()
    }

    /// Requests whose part has failed.
    pub(crate) fn failed(&self) -> &[RequestId] {
        &self.failed
    }
}
