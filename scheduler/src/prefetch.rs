//! Prefetches: bringing to host what L3 has of a request, from standing in line for a share of the host
//! to the pages that arrived.

use terrace_cache::HostPin;
use terrace_cache::planted::{Bug, planted};
use terrace_fsm::{Event as LifeEvent, Handover, OpId, StateName, Time};

use crate::config::{L3Config, PrefetchPolicy, ms};
use crate::operations::{Anchor, Operation, Work};
use crate::plan::{L3Kind, L3Op, Plan};
use crate::reading::Reading;
use crate::requests::{Entry, Handle};
use crate::scheduler::Scheduler;
use crate::waiting::{Delay, DelayReason, Found, Waiting};

/// Whether a prefetch begins.
enum Decision {
    /// It is not worth it: the request goes on without.
    Skip,
    /// There is no room in the share yet.
    Wait,
    /// The cache has lost pages that L3 was not asked about.
    AskAgain,
    /// Of so many pages, from the cache's end on.
    Go { pages: u32 },
}

impl Scheduler {
    /// The next plan begins the prefetch of what was found, or lets the request stand in line for it.
    pub(crate) fn stand_in_line_to_fetch(&mut self, handle: Handle, found: Found) {
        let (Some(config), Some(reading)) = (&self.config.l3, &mut self.reading) else { return };
        reading.was_told_about(handle);
        let stands_in_line = config.prefetch != PrefetchPolicy::BestEffort;
        let until = stands_in_line.then(|| self.prefetch_deadline(config, found.pages));
        self.requests.wait(handle, Waiting::Told { found, until });
    }

    /// Fetches what L3 has and the cache still lacks: the match is made again, here and now.
    pub(crate) fn plan_prefetches(&mut self, plan: &mut Plan) {
        while let Some(handle) = self.reading.as_ref().and_then(Reading::first_told) {
            let waiting = self.requests.get(handle).map(Entry::waiting);
            let told = match waiting {
                Some(Waiting::Told { found, .. }) => {
                    Some((found, self.decide_prefetch(handle, found)))
                }
                Some(_) | None => None,
            };
            if matches!(told, Some((_, Decision::Wait))) {
                return;
            }
            if let Some(reading) = &mut self.reading {
                reading.next_told();
            }
            match told {
                Some((found, Decision::Go { pages })) => {
                    self.start_prefetch(handle, found, pages, plan);
                }
                Some((_, Decision::AskAgain)) => self.ask_again(handle),
                Some((_, Decision::Skip | Decision::Wait)) => {
                    self.requests.wait(handle, Waiting::IN_LINE);
                }
                None => {}
            }
        }
    }

    fn decide_prefetch(&mut self, handle: Handle, found: Found) -> Decision {
        let Some(config) = &self.config.l3 else { return Decision::Skip };
        let entry = &self.requests[handle];
        let end = found.start_page + found.pages;
        let start_page = self.cache.lookup(&entry.sequence, end).host.depth;
        if start_page < found.start_page {
            return Decision::AskAgain;
        }
        let pages = end - start_page;
        if pages < config.prefetch_threshold_pages || planted(Bug::NeverPrefetch) {
            return Decision::Skip;
        }
        if !self.rates.prefetch_pays(pages, pages * self.config.cache.page_size) {
            self.stats.prefetches_priced_out += 1;
            self.rates.forgive_prefetch();
            return Decision::Skip;
        }
        if !self.prefetches_may_begin() {
            // It may be over before the request is admitted.
            self.requests[handle].asked = None;
            return Decision::Skip;
        }
        if self.is_coming(handle, start_page) {
            self.requests[handle].asked = None;
            return Decision::Skip;
        }
        let Some(reading) = &self.reading else { return Decision::Skip };
        let share = self.prefetch_share(config);
        let counts = self.operations.counts().prefetches;
        let in_use = counts.in_flight_pages + reading.waiting_pages();
        let in_share = share.saturating_sub(in_use);
        let pages_now = pages.min(share);
        if pages_now > in_share {
            if config.prefetch != PrefetchPolicy::BestEffort {
                return Decision::Wait;
            }
            // Who waits only until there is room to run does not wait for a share. There may be one by then.
            self.requests[handle].asked = None;
            return Decision::Skip;
        }
        Decision::Go { pages }
    }

    /// How long a request waits for a prefetch of so many pages, from now.
    fn prefetch_deadline(&self, config: &L3Config, pages: u32) -> Time {
        match config.prefetch {
            PrefetchPolicy::BestEffort => self.now.after(self.rates.prefetch_time(pages)),
            PrefetchPolicy::Wait { max_ms } => self.now.after(ms(max_ms)),
            PrefetchPolicy::Deadline { base_ms, per_page_us } => {
                let per_page = std::time::Duration::from_micros(per_page_us);
                self.now.after(ms(base_ms)).after(per_page.saturating_mul(pages))
            }
        }
    }

    /// Whether L3 delivers, as far as is known: it is not in back-off, and does not hold too many pages
    /// that nobody waits for any more.
    pub(crate) fn prefetches_may_begin(&self) -> bool {
        let (Some(config), Some(reading)) = (&self.config.l3, &self.reading) else { return false };
        let half_of_share = (self.prefetch_share(config) / 2).max(1);
        let quarantine_max = config.quarantine_pages_max.min(half_of_share);
        reading.may_prefetch(self.now)
            && self.operations.counts().prefetches.quarantined_pages < quarantine_max
    }

    /// Host pages that prefetches may hold.
    fn prefetch_share(&self, config: &L3Config) -> u32 {
        let most_of_host = self.config.most_of_host().max(config.prefetch_threshold_pages);
        config.prefetch_pages_max.min(most_of_host)
    }

    fn start_prefetch(&mut self, handle: Handle, told: Found, wanted: u32, plan: &mut Plan) {
        let Some(config) = &self.config.l3 else { return };
        let (share, threshold) = (self.prefetch_share(config), config.prefetch_threshold_pages);
        let deadline = self.prefetch_deadline(config, wanted.min(share));
        let fetches_in_line = config.prefetch == PrefetchPolicy::BestEffort;
        let entry = &self.requests[handle];
        let namespace = entry.sequence.root();
        let found = self.cache.lookup(&entry.sequence, self.cacheable_pages(handle));
        // Pins first: making room must not evict what the pages will continue.
        let anchor = self.cache.pin_host(namespace, found.host);
        let start_page = anchor.depth();
        let mut pages = match planted(Bug::FetchFewPages) {
            true => threshold,
            false => wanted.min(share),
        };
        pages = self.make_host_room(pages as usize) as u32;
        self.stats.prefetch_shortened_pages += u64::from(wanted - pages);
        if pages < threshold {
            self.cache.unpin_host(anchor);
            self.requests.wait(handle, Waiting::IN_LINE);
            return;
        }
        let path = self.cache.pin_again(&anchor);
        let destination = self.cache.take_host_pages(pages as usize).expect("room was made");
        let run = self.requests[handle].sequence.run(start_page, start_page + pages).keep();
        let first_key = plan.l3_keys.len() as u32;
        let first_page = plan.l3_host_pages.len() as u32;
        let asked_from = match start_page {
            _ if planted(Bug::FetchFromPageZero) => 0,
            _ if planted(Bug::UseKeysOfTheProbe) => told.start_page,
            start_page => start_page,
        };
        let asked = self.requests[handle].sequence.run(asked_from, asked_from + pages);
        asked.keys().append_to(&mut plan.l3_keys);
        plan.l3_host_pages.extend_from_slice(destination.as_slice());
        let anchor = Anchor::Pinned(anchor);
        let priority = self.requests[handle].priority;
        let work = Work::Prefetch { anchor, pages: destination, run, priority };
        let op = self.operations.start(work, Some(handle), pages, self.now);
        plan.l3.push(L3Op {
            op,
            kind: L3Kind::Prefetch,
            keys: first_key..first_key + pages,
            pages: first_page..first_page + pages,
        });
        let path = Handover::of(path);
        self.happen(handle, &LifeEvent::PrefetchStarted { op, start_page, path });
        self.announce(handle, start_page);
        let waiting = match fetches_in_line {
            true => Waiting::InLine {
                delay: Some(Delay { until: deadline, reason: DelayReason::Fetch }),
            },
            false => Waiting::Fetching { until: deadline },
        };
        self.requests.wait(handle, waiting);
    }

    /// Inserts what arrived sound where it belongs, whoever still waits for it.
    pub(crate) fn prefetch_ended(&mut self, op: OpId, operation: Operation) {
        let is_telling = operation.is_telling();
        let Operation { work, owner, started, sound_pages, is_stale, .. } = operation;
        let Operation { failed, corrupt, called_off, .. } = operation;
        let Work::Prefetch { anchor, mut pages, run, priority } = work else {
            unreachable!("a prefetch")
        };
        let keys = run.keys();
        let believed = planted(Bug::BelieveWholePrefetch);
        let sound = if believed { keys.len() } else { sound_pages as usize };
        if let Some(reading) = &mut self.reading {
            reading.note_prefetch(failed || corrupt, is_telling, self.now);
            keys.iter().take(sound).for_each(|key| reading.is_there(key));
            if let Some(undelivered) = keys.get(sound).filter(|_| !called_off) {
                reading.is_missing(undelivered, self.now);
            }
        }
        let measured = (sound > 0 && owner.is_some()).then_some(sound_pages);
        self.rates.prefetch_ended(started, self.now, measured);
        self.cache.give_host_pages(pages.split_off(sound));
        let Some(mut anchor) = self.regain(anchor) else {
            // Nobody waited, and what these pages continue is gone.
            self.cache.give_host_pages(pages);
            return;
        };
        let start_page = anchor.depth();
        self.cache.publish_from_l3(&mut anchor, run.run(start_page, sound), pages, priority);
        match owner.filter(|&handle| self.waits_for(handle, op)) {
            Some(handle) => {
                let entry = &mut self.requests[handle];
                entry.fetched = start_page..start_page + sound_pages;
                entry.uncached_tokens = None;
                if sound < keys.len() && !called_off {
                    entry.l3_lacks(start_page + sound_pages);
                }
                if let Some(reading) = &mut self.reading {
                    reading.pages_wait(sound_pages);
                }
                let path = Some(Handover::of(anchor));
                self.happen(handle, &LifeEvent::PrefetchEnded { path });
                self.stop_sharing(handle);
                if !planted(Bug::WaitOutDeadlines) {
                    self.requests.wait(handle, Waiting::IN_LINE);
                }
            }
            None if is_stale => self.cache.retire(anchor),
            None => self.cache.unpin_host(anchor),
        }
    }

    /// The pin behind which a prefetch's pages belong, if its prefix is still there.
    fn regain(&mut self, anchor: Anchor) -> Option<HostPin> {
        match anchor {
            Anchor::Pinned(pin) => Some(pin),
            Anchor::Remembered(prefix) => {
                let pages = prefix.keys().len() as u32;
                let found = self.cache.lookup(&prefix, pages).host;
                (found.depth == pages).then(|| self.cache.pin_host(prefix.root(), found))
            }
        }
    }

    /// Nobody waits for a prefetch any more: it keeps its destination, but no longer the pages that
    /// it would continue.
    pub(crate) fn loosen_anchor(&mut self, handle: Handle, op: OpId) {
        let sequence = &self.requests[handle].sequence;
        let Some(anchor) = self.operations.anchor(op) else { return };
        if let Anchor::Pinned(pin) = anchor {
            let prefix = sequence.prefix(pin.depth());
            let loose = std::mem::replace(anchor, Anchor::Remembered(Box::new(prefix)));
            if let Anchor::Pinned(pin) = loose {
                self.cache.unpin_host(pin);
            }
        }
    }

    /// The request no longer waits with pages that L3 brought for it.
    pub(crate) fn release_fetched(&mut self, handle: Handle) {
        let entry = &self.requests[handle];
        if let Some(reading) = &mut self.reading
            && entry.state() == StateName::PrefetchDone
        {
            reading.pages_wait_no_more(entry.fetched.len() as u32);
        }
    }
}
