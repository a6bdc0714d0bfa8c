//! The server over real sockets, with a toy model.

mod answers;
mod client;
mod errors;
mod fuzz;
mod launching;
mod limits;
mod metrics;
mod tenants;
mod toy;
mod world;
