//! The Responses API: a request becomes a chat request, and the answer becomes items and their events.

mod answer;
mod request;

pub(crate) use answer::{stream, whole};
pub(crate) use request::{Repeated, parse};
