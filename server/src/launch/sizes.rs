//! How many pages each tier has.

use terrace_engine::{KvLayout, PageLayout, StartError};
use terrace_replay::Size;

use super::LaunchError;
use crate::summary::Tier;

/// With fewer on the device, hardly a request would fit.
pub(super) const DEVICE_PAGES_MIN: u32 = 8;

/// How many pages each tier has.
#[derive(Debug)]
pub(crate) struct Sizes {
    page_size: u32,
    pub(crate) layout: PageLayout,
    pub(crate) page_bytes: usize,
    pub(crate) device_pages: u32,
    pub(crate) host_pages: u32,
}

impl Sizes {
    /// What so much memory of device and host holds of a model's KV.
    ///
    /// # Errors
    /// When that is too little to be useful, or more than can be counted.
    pub(crate) fn new(
        layout: &KvLayout,
        page_size: u32,
        device_memory: Size,
        host_memory: Size,
    ) -> Result<Self, LaunchError> {
        let layout = layout.pages(page_size).map_err(StartError::from)?;
        let page_bytes = layout.bytes();
        let page = Size(page_bytes as u64);
        let pages = |memory: Size| {
            let pages = memory.as_u64() / page.as_u64();
            u32::try_from(pages).map_err(|_| LaunchError::TooManyPages { memory, page })
        };
        let device_pages = pages(device_memory)?;
        if device_pages < DEVICE_PAGES_MIN {
            return Err(LaunchError::DeviceMemory {
                memory: device_memory,
                tokens: u64::from(device_pages) * u64::from(page_size),
                page,
                page_size,
                needed: Size(page.as_u64() * u64::from(DEVICE_PAGES_MIN)),
            });
        }
        Ok(Self { page_size, layout, page_bytes, device_pages, host_pages: pages(host_memory)? })
    }

    pub(crate) fn device_tier(&self) -> Tier {
        self.tier(self.device_pages)
    }

    pub(crate) fn host_tier(&self) -> Option<Tier> {
        (self.host_pages > 0).then(|| self.tier(self.host_pages))
    }

    pub(crate) fn kv_bytes_per_token(&self) -> u64 {
        self.page_bytes as u64 / u64::from(self.page_size)
    }

    fn tier(&self, pages: u32) -> Tier {
        let bytes = u64::from(pages) * self.page_bytes as u64;
        self.tier_of(bytes, u64::from(pages), 0, None)
    }

    pub(crate) fn tier_of(
        &self,
        bytes: u64,
        pages: u64,
        warm_pages: u64,
        place: Option<String>,
    ) -> Tier {
        let page_size = u64::from(self.page_size);
        Tier {
            size: Size(bytes),
            tokens: pages * page_size,
            warm_tokens: warm_pages * page_size,
            place,
            notes: Vec::new(),
        }
    }
}
