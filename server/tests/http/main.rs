//! The server over real sockets, with a toy model.

mod answers;
mod chats;
mod client;
mod errors;
mod fuzz;
mod launching;
mod limits;
mod metrics;
mod operators;
mod tenants;
mod tokens;
mod tools;
mod toy;
mod world;
