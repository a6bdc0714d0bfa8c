//! Steps that start while their pages are loaded.

use terrace_engine::{CopyError, Logits, ModelError, Step};
use terrace_model::Llama;

use super::*;

/// A model that reports when it computes with pages that are still being loaded.
struct Watched<M> {
    inner: M,
    waits_for_layers: bool,
    began: CpuFence,
}

impl<M: Forward> Forward for Watched<M> {
    type Memory = M::Memory;

    fn kv_layout(&self) -> KvLayout {
        self.inner.kv_layout()
    }

    fn vocabulary(&self) -> usize {
        self.inner.vocabulary()
    }

    fn positions_max(&self) -> u32 {
        self.inner.positions_max()
    }

    fn fingerprint(&self) -> String {
        self.inner.fingerprint()
    }

    fn waits_for_layers(&self) -> bool {
        self.waits_for_layers
    }

    fn forward(
        &mut self,
        memory: &M::Memory,
        step: &Step<'_>,
        logits: &mut Logits<'_>,
    ) -> Result<(), ModelError> {
        if !step.arriving.is_empty() {
            self.began.pass();
        }
        self.inner.forward(memory, step, logits)
    }
}

/// Behaviour of load-backs after a step that reads their pages has started.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Loading {
    Comes,
    /// Fails after it has reported the first layer, none of which has arrived.
    Fails,
    /// Fails after it has reported all layers, all of which have arrived.
    FailsLast,
}

/// A device whose load-backs wait until a step that reads their pages has started.
#[derive(Debug)]
struct WaitingDevice {
    inner: CpuDevice,
    loading: Loading,
    began: CpuFence,
}

impl Device for WaitingDevice {
    type Memory = CpuMemory;
    type Fence = CpuFence;

    fn pages(&self) -> u32 {
        self.inner.pages()
    }

    fn layout(&self) -> &PageLayout {
        self.inner.layout()
    }

    fn memory(&self) -> &Self::Memory {
        self.inner.memory()
    }

    fn host(&self) -> Option<&terrace_l3::Arena> {
        self.inner.host()
    }

    fn start_copy(&self, job: CopyJob<CpuFence>) {
        if job.direction == CopyDirection::WriteBack {
            return self.inner.start_copy(job);
        }
        let (began, done) = (self.began.clone(), job.done);
        let fails = || Err(CopyError::Failed("in the middle".to_owned()));
        match self.loading {
            Loading::Comes => {
                self.inner.start_copy(CopyJob { after: Some(began), done, ..job });
            }
            Loading::Fails => {
                std::thread::spawn(move || {
                    began.wait();
                    job.progress.arrive(1);
                    done(fails());
                });
            }
            Loading::FailsLast => {
                let done = Box::new(move |_| done(fails()));
                self.inner.start_copy(CopyJob { after: Some(began), done, ..job });
            }
        }
    }
}

fn overlapping(steps_in_flight_max: u32) -> Config {
    let mut config = config();
    config.batch.steps_in_flight_max = steps_in_flight_max;
    config.copies.load_back_overlaps = true;
    config
}

/// Repeats a request whose pages have left the device; returns both answers and the engine.
async fn ask_again(loading: Loading, steps_in_flight_max: u32) -> (Answer, Answer, Engine) {
    let inner: Llama = terrace_model::shallow(3, 2);
    let layout = inner.kv_layout().pages(PAGE_SIZE).unwrap();
    let began = CpuFence::default();
    let device = CpuDevice::new(16, 64, layout).unwrap();
    let device = Arc::new(WaitingDevice { inner: device, loading, began: began.clone() });
    let model = Threaded::new(Watched { inner, waits_for_layers: true, began });
    let config = overlapping(steps_in_flight_max);
    let engine = Engine::start(config, model, device, None).unwrap();
    let old = prompt(1, 200);
    let first = ask(&engine, &old, 8).await;
    for seed in 2..5 {
        ask(&engine, &prompt(seed, 200), 8).await;
    }
    let again = tokio::time::timeout(PATIENCE, ask(&engine, &old, 8)).await;
    (first, again.expect("the step began before its load-back"), engine)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn step_starts_before_its_pages_are_loaded() {
    for steps_in_flight_max in [1, 2] {
        let (first, again, engine) = ask_again(Loading::Comes, steps_in_flight_max).await;
        assert_eq!(again.tokens, first.tokens);
        assert!(again.hits.host_tokens > 0, "{:?}", again.hits);
        let figures = engine.figures().await.unwrap();
        assert_eq!((figures.steps.failed, figures.scheduler.load_backs.failures), (0, 0));
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn results_of_a_failed_load_back_are_discarded() {
    for (loading, failed_steps) in [(Loading::Fails, 1), (Loading::FailsLast, 0)] {
        for steps_in_flight_max in [1, 2] {
            let (first, again, engine) = ask_again(loading, steps_in_flight_max).await;
            assert_eq!(again.tokens, first.tokens, "{loading:?}");
            assert_eq!(again.hits.host_tokens, 0, "{loading:?}");
            let figures = engine.figures().await.unwrap();
            assert_eq!(figures.scheduler.load_backs.failures, 1, "{loading:?}");
            assert_eq!(figures.scheduler.steps_failed, failed_steps, "{loading:?}");
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn rejects_overlap_for_models_that_do_not_wait_for_layers() {
    let began = CpuFence::default();
    let model =
        Threaded::new(Watched { inner: ToyModel::default(), waits_for_layers: false, began });
    let refused = Engine::start(overlapping(1), model, Arc::new(device(8, 8)), None).err();
    let told = refused.expect("it would read what is not there").to_string();
    assert!(told.starts_with("copies.load_back_overlaps"), "{told}");
}
