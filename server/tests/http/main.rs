//! The server over real sockets, with a toy model.

mod answers;
mod client;
mod dashboard;
mod errors;
mod fuzz;
mod launching;
mod limits;
mod metrics;
mod scrape;
mod tenants;
mod toy;
mod world;
