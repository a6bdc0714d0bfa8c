//! The task that drives the scheduler. It makes all decisions and never waits for a transfer, a
//! step or a client.

use std::collections::{BTreeMap, VecDeque};
use std::ops::Range;
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use terrace_l3::Store;
use terrace_scheduler::{
    Config, Copy, Decode, Event, EventName, OpId, Outcome, PageKey, Plan, Prefill, Request,
    RequestId, Slot, StateName, StepId, StepResult, Time, Transition, WatchedScheduler, Witness,
};
use tokio::sync::{mpsc, oneshot};

use crate::batch::{Arrival, Awaited, Span};
use crate::call_off::CallOff;
use crate::device::{CopyError, CopyJob, CopyProgress, Device};
use crate::engine::{Drained, StartError, SubmitError};
use crate::generation::{EndReason, Generate, Generation, Sibling};
use crate::histogram::TimeHistogram;
use crate::kv_feed::KvFeeds;
use crate::live::Live;
use crate::message::{DriverMessage, DriverSender, WeightsChange};
use crate::model::{Model, StepLimits, WeightsError};
use crate::stepper::{StepJob, Stepper};
use crate::transfers::Transfers;
use crate::view::{Figures, History, StepFigures, View};

/// Largest number of messages handled before the next plan.
const BURST_MAX: usize = 1024;
/// Largest number of state transitions that one plan and its events may record.
const TRACE_MAX: u32 = 16_384;
/// Time for the result of a late step to arrive: after a pause of the whole process, completed
/// steps look late.
const STEP_GRACE: Duration = Duration::from_secs(1);

pub(crate) struct Driver<D: Device> {
    scheduler: WatchedScheduler,
    plan: Plan,
    namespace: PageKey,
    device: Arc<D>,
    transfers: Option<Transfers>,
    stepper: Stepper<D::Fence>,
    /// Cancellation flags of the L3 operations in flight.
    l3_operations: BTreeMap<OpId, CallOff>,
    /// Device-host copies in flight.
    copies: BTreeMap<OpId, CopyProgress>,
    /// The copies among them that steps wait for.
    awaited: Vec<CopyProgress>,
    messages: DriverSender,
    live: BTreeMap<RequestId, Live>,
    /// Requests with unsent updates.
    unsent: Vec<RequestId>,
    history: History,
    next_request: u64,
    positions_max: u32,
    vocabulary: usize,
    adapters: Vec<String>,
    takes_passages: bool,
    page_bytes: usize,
    /// Pending weight changes, oldest first. Nothing is planned while there is one.
    weights_changes: VecDeque<WeightsChange>,
    /// Number of steps in flight.
    steps_in_flight: u32,
    /// Ended steps, whose memory is reused.
    #[expect(clippy::vec_box, reason = "a step travels in its box, and keeps it")]
    spare: Vec<Box<StepJob>>,
    /// The request that the model last saw in each row.
    rows: Vec<Option<RequestId>>,
    /// Rows whose request has ended, not yet reported to the model.
    went: Vec<Slot>,
    last_step_ended: Option<StepId>,
    last_started: Option<StepId>,
    /// Indices of the spans with outputs in the step started last.
    outputs_wanted: Vec<usize>,
    /// Earliest time at which the next step could have started.
    could_begin_at: Instant,
    /// Time at which the oldest step in flight was first found to be late.
    step_late_since: Option<Instant>,
    /// End of the last step on the device.
    idle_since: Instant,
    steps: StepFigures,
    queue: TimeHistogram,
    kv_feeds: KvFeeds,
    started: Instant,
    closing: Option<Closing>,
    /// Reason why the device is lost.
    failure: Arc<OnceLock<String>>,
}

/// A shutdown in progress.
struct Closing {
    /// When running requests are cancelled; none once they have been.
    patience_ends: Option<Instant>,
    /// When transfers are abandoned.
    gives_up: Instant,
    replies: Vec<oneshot::Sender<Drained>>,
    drained: Drained,
}

impl Closing {
    fn new(patience: Duration) -> Self {
        let patience_ends = Instant::now() + patience;
        Self {
            patience_ends: Some(patience_ends),
            gives_up: patience_ends + patience,
            replies: Vec::new(),
            drained: Drained::default(),
        }
    }
}

impl<D: Device> Driver<D> {
    pub(crate) fn new<M>(
        mut config: Config,
        mut model: M,
        device: Arc<D>,
        store: Option<Arc<dyn Store>>,
        witnesses: Vec<Box<dyn Witness>>,
        messages: DriverSender,
    ) -> Result<Self, StartError>
    where
        M: Model<Memory = D::Memory, Fence = D::Fence>,
    {
        let layout = model.kv_layout().pages(config.cache.page_size)?;
        if *device.layout() != layout {
            let (model, device) = (layout.to_string(), device.layout().to_string());
            return Err(StartError::Layout { model, device });
        }
        if config.copies.load_back_overlaps && !model.waits_for_layers() {
            return Err(StartError::Overlap);
        }
        config.model.layout = layout.kv().to_string();
        config.model.dtype = layout.kv().dtypes();
        config.trace_max = TRACE_MAX;
        // A decode computes one token in a step: there is no draft model, and tokens are sent one
        // by one.
        config.batch.decode_tokens = 1;
        config.batch.repeats_max = 0;
        config.cache.host_pages = device.host().map_or(0, terrace_l3::Arena::pages);
        let store = store.filter(|_| config.cache.host_pages > 0);
        config.l3 = store.as_ref().and(Some(config.l3.unwrap_or_default()));
        config.cache.device_pages = device.pages();
        let transfers = match (store, device.host()) {
            (Some(store), Some(host)) => Some(Transfers::new(store, host.clone())?),
            (Some(_), None) | (None, _) => None,
        };
        let limits = StepLimits {
            page_size: config.cache.page_size,
            rows: config.batch.running_max,
            tokens_max: config.batch.step_tokens_max,
        };
        let (positions_max, vocabulary) = (model.positions_max(), model.vocabulary());
        let (adapters, takes_passages) = (model.adapters(), model.takes_passages());
        // A model may take long to start, and may know its KV fingerprint only then.
        config.check()?;
        model.begin(device.memory(), limits)?;
        config.model.fingerprint = model.fingerprint();
        let scheduler = WatchedScheduler::new(config, witnesses)?;
        Ok(Self {
            namespace: scheduler.namespace_of("", ""),
            scheduler,
            plan: Plan::default(),
            stepper: Stepper::spawn(model, messages.clone())?,
            device,
            transfers,
            messages,
            live: BTreeMap::new(),
            unsent: Vec::new(),
            history: History::default(),
            next_request: 0,
            positions_max,
            vocabulary,
            adapters,
            takes_passages,
            page_bytes: layout.bytes(),
            weights_changes: VecDeque::new(),
            l3_operations: BTreeMap::new(),
            copies: BTreeMap::new(),
            awaited: Vec::new(),
            steps_in_flight: 0,
            spare: Vec::new(),
            rows: vec![None; limits.rows as usize],
            went: Vec::new(),
            last_step_ended: None,
            last_started: None,
            outputs_wanted: Vec::new(),
            could_begin_at: Instant::now(),
            step_late_since: None,
            idle_since: Instant::now(),
            steps: StepFigures::default(),
            queue: TimeHistogram::default(),
            kv_feeds: KvFeeds::default(),
            started: Instant::now(),
            closing: None,
            failure: Arc::default(),
        })
    }

    /// Returns the cell that holds the reason once the device has failed permanently.
    pub(crate) fn failure(&self) -> Arc<OnceLock<String>> {
        self.failure.clone()
    }

    /// Runs until a shutdown is complete or the device has failed permanently.
    pub(crate) async fn run(mut self, mut received: mpsc::UnboundedReceiver<DriverMessage>) {
        loop {
            let message = match self.wake_at() {
                Some(at) => tokio::time::timeout_at(at.into(), received.recv()).await.ok(),
                None => Some(received.recv().await),
            };
            if self.steps_in_flight == 0 {
                self.could_begin_at = Instant::now();
            }
            if let Some(message) = message.flatten() {
                self.handle(message);
            }
            for _ in 0..BURST_MAX {
                let Ok(message) = received.try_recv() else { break };
                self.handle(message);
            }
            self.check_step_timeout();
            if self.failure.get().is_some() {
                let closing = self.closing.take().unwrap_or_else(|| Closing::new(Duration::ZERO));
                return self.close(closing, EndReason::DeviceLost).await;
            }
            self.call_off_late();
            match self.weights_changes.front_mut() {
                None => self.plan(),
                Some(change) if self.steps_in_flight == 0 => {
                    if let Some(weights) = change.weights.take() {
                        self.stepper.replace_weights(weights);
                    }
                }
                Some(_) => {}
            }
            self.flush_updates();
            if let Some(closing) = self.take_closing_if_drained() {
                return self.close(closing, EndReason::Aborted).await;
            }
        }
    }

    fn now(&self) -> Time {
        Time(self.started.elapsed().as_micros() as u64)
    }

    /// Returns the next time at which the task must run even without a message.
    fn wake_at(&self) -> Option<Instant> {
        let deadline = self.scheduler.deadline().filter(|_| self.weights_changes.is_empty());
        let planned = deadline.map(|at| self.started + Duration::from_micros(at.0));
        let closing = self.closing.as_ref();
        let closing = closing.map(|closing| closing.patience_ends.unwrap_or(closing.gives_up));
        [planned, closing, self.step_deadline()].into_iter().flatten().min()
    }

    /// Returns the time at which to check the oldest step in flight, if the device limits step
    /// time.
    fn step_deadline(&self) -> Option<Instant> {
        let timeout = self.device.step_timeout().filter(|_| self.steps_in_flight > 0)?;
        let late = self.step_late_since.map(|since| since + STEP_GRACE);
        Some(late.unwrap_or(self.could_begin_at + timeout))
    }

    // ---- input ----

    fn handle(&mut self, message: DriverMessage) {
        match message {
            DriverMessage::Submit { generate, siblings, reply } => {
                let taken = self.submit(*generate, siblings);
                // If the caller is gone, dropping the answers cancels their requests.
                drop(reply.send(taken));
            }
            DriverMessage::Abort(request) => self.abort(request),
            DriverMessage::Finish(request) => {
                if let Some(live) = self.live.get_mut(&request) {
                    live.finish();
                }
            }
            DriverMessage::StepEnded(job) => self.step_ended(job),
            DriverMessage::Operation { op, outcome } => self.operation_ended(op, outcome),
            DriverMessage::Figures(reply) => drop(reply.send(self.figures())),
            DriverMessage::View { salts, nodes_max, reply } => {
                drop(reply.send(self.view(&salts, nodes_max)));
            }
            DriverMessage::Namespaces { salts, reply } => drop(reply.send(self.namespaces(&salts))),
            DriverMessage::ClearCache(reply) => {
                let now = self.now();
                let _ = reply.send(self.scheduler.clear_cache(now));
            }
            DriverMessage::ClearDevice(reply) => {
                let now = self.now();
                let _ = reply.send(self.scheduler.clear_device(now));
            }
            DriverMessage::CheckDevice(reply) => {
                if self.steps_in_flight == 0 {
                    self.check_device();
                }
                let _ = reply.send(());
            }
            DriverMessage::ReplaceWeights(change) => self.weights_changes.push_back(change),
            DriverMessage::WeightsReplaced(result) => self.weights_replaced(result),
            DriverMessage::FollowKv { batches_max, reply } => {
                // The snapshot follows with the next plan.
                let feed = self.kv_feeds.open(batches_max, self.messages.clone());
                drop(reply.send(feed));
            }
            // A plan follows every message and sends the snapshot.
            DriverMessage::KvFeedHasRoom => {}
            DriverMessage::Shutdown { patience, reply } => self.begin_to_close(patience, reply),
        }
    }

    /// Starts a shutdown, or joins the one in progress.
    fn begin_to_close(&mut self, patience: Duration, reply: oneshot::Sender<Drained>) {
        let closing = self.closing.get_or_insert_with(|| Closing::new(patience));
        closing.replies.push(reply);
    }

    /// Ends the engine if the device has failed permanently.
    fn check_device(&self) {
        if let Some(reason) = self.device.failure() {
            self.fail(reason);
        }
    }

    /// Ends the engine if the device has not finished a step in time.
    fn check_step_timeout(&mut self) {
        let now = Instant::now();
        if self.step_deadline().is_none_or(|deadline| now < deadline) {
            return;
        }
        if self.step_late_since.is_none() {
            self.step_late_since = Some(now);
        } else {
            // The clone is leaked: dropping the device would wait for its copies, which may hang
            // too.
            std::mem::forget(self.device.clone());
            let waited = self.could_begin_at.elapsed().as_secs_f64();
            self.fail(format!("it hangs: a step has not ended after {waited:.1} s"));
        }
    }

    /// Records the first reason for which the device is lost.
    fn fail(&self, reason: String) {
        if self.failure.get().is_none() {
            tracing::error!("the device has failed, and the engine ends: {reason}");
            let _ = self.failure.set(reason);
        }
    }

    fn submit(
        &mut self,
        mut generate: Generate,
        siblings: Vec<Sibling>,
    ) -> Result<Vec<Generation>, SubmitError> {
        if self.closing.is_some() {
            return Err(SubmitError::ShuttingDown);
        }
        let (prompt_tokens, max_new_tokens) = (generate.prompt.len(), generate.max_new_tokens);
        let positions_max = self.positions_max;
        if prompt_tokens as u64 + u64::from(max_new_tokens) > u64::from(positions_max) {
            return Err(SubmitError::TooLong { prompt_tokens, max_new_tokens, positions_max });
        }
        let vocabulary = self.vocabulary;
        let is_unknown = |token: &&u32| **token as usize >= vocabulary;
        if let Some(&token) = generate.prompt.iter().find(is_unknown) {
            return Err(SubmitError::UnknownToken { token, vocabulary });
        }
        let adapter = &generate.adapter;
        if !adapter.is_empty() && !self.adapters.contains(adapter) {
            let (adapter, known) = (adapter.clone(), self.adapters.clone());
            return Err(SubmitError::UnknownAdapter { adapter, known });
        }
        if !generate.passages.is_empty() && !self.takes_passages {
            return Err(SubmitError::Passages);
        }
        let first = Sibling {
            sampling: generate.sampling,
            grammar: generate.grammar.take(),
            ticket: generate.ticket.take(),
        };
        let now = self.now();
        let answers: Vec<_> = (self.next_request..)
            .zip(std::iter::once(first).chain(siblings))
            .map(|(id, own)| Live::new(RequestId(id), &generate, own, now))
            .collect();
        let mut ids = answers.iter().map(|(live, _)| live.view.id);
        let request = Request {
            id: ids.next().expect("there is a first"),
            siblings: ids.collect(),
            prompt: generate.prompt,
            // A step always chooses a token, even if none is wanted.
            max_new_tokens: max_new_tokens.max(1),
            computes_prompt: generate.prompt_logprobs,
            priority: generate.priority,
            adapter: generate.adapter,
            salt: generate.salt,
            waits_for_tokens: false,
            passages: generate.passages,
            reads: generate.reads,
            writes: generate.writes,
        };
        self.scheduler.submit(now, request)?;
        self.next_request += answers.len() as u64;
        let taken = answers.into_iter().map(|(live, updates)| {
            let id = live.view.id;
            self.live.insert(id, live);
            Generation::new(id, updates, self.messages.clone())
        });
        Ok(taken.collect())
    }

    fn abort(&mut self, request: RequestId) {
        let now = self.now();
        // The request may have ended meanwhile.
        let _ = self.scheduler.abort(now, request);
    }

    fn weights_replaced(&mut self, result: Result<String, WeightsError>) {
        let change = self.weights_changes.pop_front().expect("a change is pending");
        let result = result.map(|fingerprint| {
            let now = self.now();
            self.scheduler.replace_weights(now, &fingerprint).expect("no step is in flight");
            self.namespace = self.scheduler.namespace_of("", "");
        });
        // The caller may have stopped waiting.
        let _ = change.reply.send(result);
    }

    fn operation_ended(&mut self, op: OpId, outcome: Outcome) {
        let now = self.now();
        if outcome != Outcome::TimedOut {
            let is_copy = self.copies.remove(&op).is_some();
            self.l3_operations.remove(&op);
            if is_copy && outcome == Outcome::Failed {
                self.check_device();
            }
        }
        let event = Event::Operation { op, rank: 0, outcome };
        self.scheduler.advance(now, event).expect("only planned operations are reported");
    }

    fn step_ended(&mut self, mut job: Box<StepJob>) {
        let now = self.now();
        self.steps_in_flight -= 1;
        self.last_step_ended = Some(job.step);
        self.step_late_since = None;
        // A step that was launched ahead could not start before the step before it ended.
        let could_begin_at = job.could_begin_at.max(self.idle_since);
        (self.could_begin_at, self.idle_since) = (job.ended_at, job.ended_at);
        self.steps.steps += 1;
        self.steps.busy_us += job.ended_at.duration_since(could_begin_at).as_micros() as u64;
        self.steps.model_us += job.model_time.as_micros() as u64;
        match &job.result {
            Ok(()) => self.tokens_produced(&mut job, now),
            Err(error) => {
                tracing::error!("{error}");
                self.steps.failed += 1;
                let event = Event::StepFailed { step: job.step };
                self.scheduler.advance(now, event).expect("the step was planned");
                let lives = job.requests.iter().filter_map(|request| self.live.get(request));
                lives.for_each(Live::call_off);
                self.check_device();
            }
        }
        self.spare.push(job);
    }

    /// Reports the tokens of a step to the scheduler and queues the updates of their requests.
    fn tokens_produced(&mut self, job: &mut StepJob, now: Time) {
        let StepJob { step, batch, requests, outputs, checksums, .. } = job;
        for ((wanted, &request), output) in
            batch.wanted.iter().zip(&*requests).zip(outputs.iter_mut())
        {
            let Some(live) = self.live.get_mut(&request) else { continue };
            let start = batch.spans[wanted.span].start;
            live.take_scores(start, std::mem::take(&mut output.scores));
        }
        let results = requests.iter().zip(&*outputs).filter_map(|(&request, output)| {
            let chosen = output.chosen.as_ref()?;
            let finished = self.live.get(&request)?.ends_with(chosen);
            let tokens = std::slice::from_ref(&chosen.token);
            Some(StepResult { request, tokens, finished })
        });
        let results: Vec<_> = results.collect();
        let event = Event::StepDone { step: *step, results: &results, failed: &[] };
        self.scheduler.advance(now, event).expect("every request that was to produce has a token");
        drop(results);
        let asked = batch.wanted.iter().zip(&*requests).zip(outputs).zip(&*checksums);
        for (((wanted, &request), output), &checksum) in asked {
            let (Some(choice), Some(live)) = (&wanted.choice, self.live.get_mut(&request)) else {
                continue;
            };
            // The step may have been started before the request's end was known.
            let answered = self.scheduler.tokens(request).map_or(0, |all| all.appended.len());
            match output.chosen.take() {
                Some(chosen) if answered > choice.index as usize => {
                    if choice.index == 0 {
                        live.start(self.scheduler.hits(request).unwrap_or_default());
                    }
                    live.produce(chosen, checksum);
                    self.unsent.push(request);
                }
                Some(_) | None => live.call_off(),
            }
        }
    }

    /// Sends queued updates. Requests that have ended in between have sent theirs.
    fn flush_updates(&mut self) {
        for request in self.unsent.drain(..) {
            if let Some(live) = self.live.get_mut(&request) {
                live.send_updates();
            }
        }
    }

    // ---- output ----

    fn plan(&mut self) {
        let mut plan = std::mem::take(&mut self.plan);
        let now = self.now();
        self.scheduler.plan_into(now, &mut plan);
        for ended in &plan.ended {
            if let Some(slot) = self.live.get(&ended.request).and_then(|live| live.slot)
                && self.rows[slot.0 as usize]
                    .take_if(|request_of_row| *request_of_row == ended.request)
                    .is_some()
            {
                self.went.push(slot);
            }
        }
        for copy in &plan.copies {
            self.start_copy(&plan, copy);
        }
        if let Some(step) = plan.step {
            self.start_step(step, &plan);
        }
        // L3 operations start after the step, so the model does not wait for them.
        for op in &plan.l3 {
            let transfers = self.transfers.as_ref().expect("L3 is planned only where there is one");
            let mut prefixes = Vec::with_capacity(plan.l3_host_pages(op).len());
            self.scheduler.l3_digests(op.op, &mut prefixes);
            let call_off = transfers.start(&plan, op, self.namespace, prefixes, &self.messages);
            self.l3_operations.insert(op.op, call_off);
        }
        for op in &plan.cancelled {
            let copy = self.copies.get(op).map(CopyProgress::calls_off);
            if let Some(call_off) = copy.or_else(|| self.l3_operations.get(op)) {
                call_off.call_off();
            }
        }
        for transition in self.scheduler.drain_trace() {
            if let Some(live) = self.live.get_mut(&transition.request) {
                if is_first_admission(&transition) {
                    self.queue.observe(live.view.age_us(transition.at));
                }
                live.view.enter(transition.to, transition.at);
            }
        }
        for ended in &plan.ended {
            if let Some(live) = self.live.remove(&ended.request) {
                self.history.add(live.end(EndReason::of(ended)));
            }
        }
        self.kv_feeds.publish(&mut self.scheduler);
        self.plan = plan;
    }

    fn start_copy(&mut self, plan: &Plan, copy: &Copy) {
        let (op, messages) = (copy.op, self.messages.clone());
        let progress = CopyProgress::new(op);
        self.copies.insert(op, progress.clone());
        let ended = progress.clone();
        self.device.start_copy(CopyJob {
            direction: copy.direction,
            device_pages: plan.device_pages(copy).to_vec(),
            host_pages: plan.host_pages(copy).to_vec(),
            // Pages are reassigned and written back after the last step that used them has
            // reported.
            after: self.last_step_ended.and_then(|step| self.stepper.fence_behind(step)),
            progress,
            done: Box::new(move |copied| {
                let outcome = match &copied {
                    Ok(()) => Outcome::Done,
                    Err(CopyError::CalledOff) => Outcome::CalledOff(0),
                    Err(error @ CopyError::Failed(_)) => {
                        tracing::warn!("{error}");
                        Outcome::Failed
                    }
                };
                // Sent before waiters wake, so that a step that waited for the copy is reported
                // after it.
                messages.send(DriverMessage::Operation { op, outcome });
                ended.end(copied);
            }),
        });
    }

    /// Sends a step to the model, with the row changes since the step before.
    fn start_step(&mut self, step: StepId, plan: &Plan) {
        let mut job = self.spare.pop().unwrap_or_else(|| Box::new(StepJob::new()));
        job.begin(step, self.could_begin_at);
        let batch = job.batch_mut();
        batch.went.append(&mut self.went);
        batch.take_rows(plan);
        self.awaited.retain(|progress| self.copies.contains_key(&progress.op()));
        for &Prefill { request, slot, start, tokens, produces_token, waits_for, .. } in
            &plan.prefills
        {
            self.await_copy(waits_for);
            let positions = start..start + tokens;
            self.add_span(&mut job, request, slot, positions, produces_token, None);
        }
        for &Decode { request, slot, start, tokens, input, .. } in &plan.decodes {
            let awaited = input.map(|row| self.output_of(plan.behind, row));
            self.add_span(&mut job, request, slot, start..start + tokens, true, awaited);
        }
        job.batch_mut().arriving.extend_from_slice(&self.awaited);
        self.last_started = Some(step);
        self.outputs_wanted.clear();
        self.outputs_wanted.extend(job.batch.wanted.iter().map(|wanted| wanted.span));
        self.steps_in_flight += 1;
        self.stepper.start(job);
    }

    /// Makes steps wait for a load-back until it has ended: steps after the first read its pages
    /// too.
    fn await_copy(&mut self, op: Option<OpId>) {
        let is_awaited = |op| self.awaited.iter().any(|progress| progress.op() == op);
        if let Some(op) = op.filter(|op| !is_awaited(*op)) {
            self.awaited.push(self.copies[&op].clone());
        }
    }

    /// Returns the index of an awaited token among the outputs of the step started last.
    fn output_of(&self, behind: Option<StepId>, row: u32) -> usize {
        assert_eq!(self.last_started, behind, "only the step before is awaited");
        let output = self.outputs_wanted.binary_search(&(row as usize));
        output.expect("an awaited step chooses a token")
    }

    /// Adds the span of a request. `awaited` is the output of the previous step that supplies its
    /// single token, if that token is not known yet.
    fn add_span(
        &mut self,
        job: &mut StepJob,
        request: RequestId,
        slot: Slot,
        positions: Range<u32>,
        produces: bool,
        awaited: Option<usize>,
    ) {
        let (batch, requests) = job.parts();
        let live = self.live.get_mut(&request).expect("a computing request is live");
        let all = self.scheduler.tokens(request).expect("a computing request is live");
        if self.rows[slot.0 as usize].replace(request) != Some(request) {
            // The model's state of the request's former row is outdated.
            if let Some(before) = live.slot.replace(slot).filter(|before| *before != slot)
                && self.rows[before.0 as usize]
                    .take_if(|request_of_row| *request_of_row == request)
                    .is_some()
            {
                batch.went.push(before);
            }
            let choosing = live.choosing.clone();
            let mut produced = Vec::new();
            if choosing.shaping.counts_tokens() {
                let answer = live.view.prompt_tokens as usize..all.len();
                for part in all.range(answer) {
                    produced.extend_from_slice(part);
                }
            }
            let (adapter, passages) = (live.adapter.clone(), live.passages.clone());
            batch.came.push(Arrival { slot, choosing, produced, adapter, passages });
        }
        let first = batch.tokens.len();
        match awaited {
            Some(output) => {
                batch.awaited.push(Awaited { token: first, output });
                batch.tokens.push(0);
            }
            None => {
                for part in all.range(positions.start as usize..positions.end as usize) {
                    batch.tokens.extend_from_slice(part);
                }
            }
        }
        let tokens = first..batch.tokens.len();
        let logits = live.want(batch, positions.clone(), produces);
        batch.spans.push(Span { slot, start: positions.start, tokens, logits });
        if logits > 0 {
            requests.push(request);
        }
    }

    // ---- views ----

    fn figures(&self) -> Figures {
        Figures {
            scheduler: self.scheduler.stats(),
            store: self.transfers.as_ref().map(|transfers| transfers.store().stats()),
            steps: self.steps,
            queue: self.queue,
            page_size: self.scheduler.config().cache.page_size,
            page_bytes: self.page_bytes,
        }
    }

    fn view(&self, salts: &[String], nodes_max: usize) -> View {
        let namespaces = self.namespaces(salts);
        let live = self.live.values().map(|live| &live.view);
        let shown = self.history.iter().chain(live);
        View {
            now_us: self.now().0,
            figures: self.figures(),
            requests: shown.filter(|view| salts.contains(&view.salt)).cloned().collect(),
            tree: self.scheduler.tree(&namespaces, nodes_max),
        }
    }

    fn namespaces(&self, salts: &[String]) -> Vec<PageKey> {
        salts.iter().map(|salt| self.scheduler.namespace_of("", salt)).collect()
    }

    // ---- shutdown ----

    /// Cancels the requests that are unfinished when the patience of a shutdown ends.
    fn call_off_late(&mut self) {
        let now = self.now();
        let Some(closing) = &mut self.closing else { return };
        if closing.patience_ends.take_if(|ends| *ends <= Instant::now()).is_none() {
            return;
        }
        for (&request, live) in &self.live {
            if !live.is_answered() && self.scheduler.abort(now, request).is_ok() {
                closing.drained.aborted += 1;
            }
        }
    }

    /// Returns the shutdown once no work is left to wait for.
    fn take_closing_if_drained(&mut self) -> Option<Closing> {
        let closing = self.closing.as_mut()?;
        let under_way = self.scheduler.stats().transfers_under_way();
        let is_quiet = self.live.is_empty() && self.steps_in_flight == 0 && under_way == 0;
        if !is_quiet && Instant::now() < closing.gives_up {
            return None;
        }
        closing.drained.abandoned_transfers = under_way;
        self.closing.take()
    }

    async fn close(self, closing: Closing, reason: EndReason) {
        for (_, live) in self.live {
            live.end(reason);
        }
        if let Some(transfers) = &self.transfers {
            let left = closing.gives_up.max(Instant::now() + Duration::from_secs(1));
            match tokio::time::timeout_at(left.into(), transfers.store().shutdown()).await {
                Ok(Ok(())) => {}
                Ok(Err(error)) => tracing::error!("the store could not be shut down: {error}"),
                Err(_) => tracing::error!("the store did not shut down in time"),
            }
        }
        for reply in closing.replies {
            let _ = reply.send(closing.drained);
        }
    }
}

/// Returns whether a transition is the request's first admission. A retracted request is admitted
/// again, and its waiting time does not start at its submission.
fn is_first_admission(transition: &Transition) -> bool {
    transition.event == EventName::Admitted && transition.from != StateName::Retracted
}
