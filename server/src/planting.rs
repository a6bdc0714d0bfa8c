//! Wrong pages, planted on purpose: whoever asks a question before and after sees what one page of somebody else's KV
//! does to an answer. Only servers that are started for it do this, and what they compute is theirs alone.

use std::sync::Arc;

use axum::http::{HeaderMap, StatusCode};
use axum::response::Response;
use parking_lot::Mutex;
use serde::Deserialize;
use serde_json::json;
use terrace_engine::{
    CpuMemory, Forward, KvLayout, Logits, ModelError, NewWeights, Span, Step, WeightsError,
};

use crate::cache_reset::check_origin;
use crate::error::{ApiError, json_response};
use crate::state::State;

/// Where a page is to be made wrong, shared by the server, which is told, and the model, which does it.
#[derive(Clone, Debug, Default)]
pub struct Planting(Arc<Mutex<Option<u32>>>);

impl Planting {
    /// Has the page with this token of a sequence made wrong before the next step that reads it from the cache.
    pub fn plant(&self, token: u32) {
        *self.0.lock() = Some(token);
    }
}

/// A model on the CPU whose device pages can be made wrong.
#[derive(Debug)]
pub(crate) struct Plantable<F> {
    pub(crate) model: F,
    pub(crate) planting: Planting,
}

impl<F> Plantable<F> {
    /// Puts the first page of a sequence where the wanted one should be, or the second if it is the first, once a
    /// sequence has computed the wanted one before. While it is being copied it is left as it is, for a later step.
    fn plant(&self, memory: &CpuMemory, step: &Step<'_>) {
        let mut wanted = self.planting.0.lock();
        let Some(token) = *wanted else { return };
        let page_size = step.table.page_size();
        let page = token / page_size;
        let other = u32::from(page == 0);
        let behind = |span: &&Span| span.start / page_size > page.max(other);
        let Some(span) = step.spans.iter().find(behind) else { return };
        // A step that would write to the page alone.
        let writing = Span {
            slot: span.slot,
            start: page * page_size,
            tokens: 0..page_size as usize,
            logits: 0,
        };
        let row = step.table.row(span.slot);
        let Ok(mut pages) = memory.lend(&Step { spans: &[writing], ..*step }) else { return };
        let elsewhere = pages.read(row[other as usize]).to_vec();
        pages.write(row[page as usize]).copy_from_slice(&elsewhere);
        *wanted = None;
        tracing::warn!(
            "page {page} of a sequence was made wrong on the device, as the operator wanted"
        );
    }
}

impl<F: Forward<Memory = CpuMemory>> Forward for Plantable<F> {
    type Memory = CpuMemory;

    fn kv_layout(&self) -> KvLayout {
        self.model.kv_layout()
    }

    fn vocabulary(&self) -> usize {
        self.model.vocabulary()
    }

    fn positions_max(&self) -> u32 {
        self.model.positions_max()
    }

    /// Another than the model's own: a wrong page may be copied to host and L3, and no other server may find it there.
    fn fingerprint(&self) -> String {
        format!("{}-with-wrong-pages", self.model.fingerprint())
    }

    fn replace_weights(&mut self, weights: NewWeights) -> Result<(), WeightsError> {
        self.model.replace_weights(weights)
    }

    fn waits_for_layers(&self) -> bool {
        self.model.waits_for_layers()
    }

    fn forward(
        &mut self,
        memory: &CpuMemory,
        step: &Step<'_>,
        logits: &mut Logits<'_>,
    ) -> Result<(), ModelError> {
        self.plant(memory, step);
        self.model.forward(memory, step, logits)
    }
}

/// What the address says.
#[derive(Debug, Deserialize)]
pub(crate) struct Wish {
    token: u32,
}

/// Whether wrong pages can be planted here.
pub(crate) fn tell(state: &State, headers: &HeaderMap) -> Result<Response, ApiError> {
    state.gate.operator(headers)?;
    let told = json!({ "plants_wrong_pages": state.planting.is_some() });
    Ok(json_response(StatusCode::OK, &told))
}

/// Has a page made wrong.
pub(crate) fn plant(
    state: &State,
    headers: &HeaderMap,
    Wish { token }: Wish,
) -> Result<Response, ApiError> {
    state.gate.operator(headers)?;
    state.check_open()?;
    check_origin(headers)?;
    let Some(planting) = &state.planting else {
        return Err(ApiError::invalid(
            "this server plants no wrong pages: start one for it with --plant-wrong-pages",
        ));
    };
    planting.plant(token);
    Ok(json_response(StatusCode::OK, &json!({ "token": token })))
}
