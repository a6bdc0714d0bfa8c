//! The server over real sockets, with a toy model.

mod answers;
mod book;
mod chats;
mod client;
mod cors;
mod dashboard;
mod errors;
mod fuzz;
mod gpu;
#[cfg(feature = "models")]
mod hub;
mod known_fields;
mod launching;
mod limits;
mod logprobs;
mod lost_device;
mod metrics;
mod operators;
mod reasoning;
mod responses;
mod routing;
mod sampling;
mod scrape;
#[cfg(feature = "structured-outputs")]
mod structured;
mod tenants;
mod tokens;
mod tools;
mod toy;
mod world;
