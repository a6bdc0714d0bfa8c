//! KV that is still being loaded when a step begins.

use std::sync::mpsc;
use std::time::Duration;

use terrace_cache::{Cache, CacheConfig};
use terrace_engine::{
    CopyError, CopyJob, CopyProgress, CpuDevice, CpuFence, CpuMemory, Device, Forward, Logits,
    ModelError, PageTable, Span, Step,
};
use terrace_kit::Dice;
use terrace_model::Llama;
use terrace_scheduler::{CopyDirection, DevicePage, HostPage, OpId, Slot, Token};

use crate::world::bits;

const PAGE_SIZE: u32 = 16;
/// Two pages are loaded, and half of a third is computed behind them.
const LOADED: usize = 32;
const TOKENS: usize = 40;

struct Loading {
    model: Llama,
    device: CpuDevice,
    table: PageTable,
    device_pages: Vec<DevicePage>,
    host_pages: Vec<HostPage>,
    tokens: Vec<Token>,
}

impl Loading {
    /// Creates one whose pages are on the host and overwritten on the device.
    fn new() -> (Self, Vec<f32>) {
        let model = terrace_model::shallow(3, 2);
        let layout = model.kv_layout().pages(PAGE_SIZE).unwrap();
        let device = CpuDevice::new(4, 4, layout).unwrap();
        let config = CacheConfig {
            page_size: PAGE_SIZE,
            device_pages: 4,
            host_pages: 4,
            ..CacheConfig::default()
        };
        let mut cache = Cache::new(&config);
        let device_pages = cache.take_device_pages(3).unwrap().as_slice().to_vec();
        let host_pages = cache.take_host_pages(2).unwrap().as_slice().to_vec();
        let mut table = PageTable::new(1, PAGE_SIZE);
        table.set(Slot(0), 0, &device_pages);
        let tokens = Dice::new(3).tokens(TOKENS, model.vocabulary());
        let mut loading = Self { model, device, table, device_pages, host_pages, tokens };
        loading.forward(0..LOADED, &[]).unwrap();
        let expected = loading.forward(LOADED..TOKENS, &[]).unwrap();
        let (copy, done) = loading.copy(CopyDirection::WriteBack, None);
        loading.device.start_copy(copy);
        done.recv().unwrap().unwrap();
        loading.spoil();
        (loading, expected)
    }

    fn copy(
        &self,
        direction: CopyDirection,
        after: Option<CpuFence>,
    ) -> (CopyJob<CpuFence>, mpsc::Receiver<Result<(), CopyError>>) {
        let (sender, done) = mpsc::channel();
        let job = CopyJob {
            direction,
            device_pages: self.device_pages[..2].to_vec(),
            host_pages: self.host_pages.clone(),
            after,
            progress: CopyProgress::new(OpId(1)),
            done: Box::new(move |copied| sender.send(copied).unwrap()),
        };
        (job, done)
    }

    fn spoil(&self) {
        let span = Span { slot: Slot(0), start: 0, tokens: 0..TOKENS, logits: 0 };
        let step = Step { spans: &[span], tokens: &self.tokens, table: &self.table, arriving: &[] };
        let mut pages = self.device.memory().lend(&step).unwrap();
        self.device_pages.iter().for_each(|page| pages.write(*page).fill(f32::NAN));
    }

    /// Computes some positions, and returns the logits after the last.
    fn forward(
        &mut self,
        positions: std::ops::Range<usize>,
        arriving: &[CopyProgress],
    ) -> Result<Vec<f32>, ModelError> {
        let memory: &CpuMemory = self.device.memory();
        let tokens = &self.tokens[positions.clone()];
        let span = Span {
            slot: Slot(0),
            start: positions.start as u32,
            tokens: 0..tokens.len(),
            logits: 1,
        };
        let step = Step { spans: &[span], tokens, table: &self.table, arriving };
        let (mut logits, mut rows) = (Vec::new(), Vec::new());
        let mut take = |rows: &[f32]| logits.extend_from_slice(rows);
        let vocabulary = self.model.vocabulary();
        let mut taken = Logits::new(vocabulary, &mut rows, &mut take);
        self.model.forward(memory, &step, &mut taken)?;
        Ok(logits)
    }
}

#[test]
fn a_step_waits_for_the_layers_of_what_is_loaded() {
    let (mut loading, expected) = Loading::new();
    let fence = CpuFence::default();
    let (copy, done) = loading.copy(CopyDirection::LoadBack, Some(fence.clone()));
    let progress = copy.progress.clone();
    loading.device.start_copy(copy);
    let found = std::thread::scope(|scope| {
        let step = scope.spawn(|| loading.forward(LOADED..TOKENS, &[progress]).unwrap());
        std::thread::sleep(Duration::from_millis(100));
        let is_early = step.is_finished();
        fence.pass();
        assert!(!is_early, "nothing has arrived");
        step.join().unwrap()
    });
    done.recv().unwrap().unwrap();
    assert_eq!(bits(&found), bits(&expected));
}

#[test]
fn a_step_fails_if_what_it_reads_does_not_come() {
    let (mut loading, _) = Loading::new();
    let progress = CopyProgress::new(OpId(1));
    progress.arrive(1);
    progress.end(Err(CopyError::Failed("at the second layer".to_owned())));
    let failed = loading.forward(LOADED..TOKENS, &[progress]);
    assert!(failed.unwrap_err().to_string().contains("at the second layer"));
}
