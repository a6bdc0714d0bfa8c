//! An inference server: the HTTP interface that OpenAI's clients know, in front of an
//! [`Engine`](terrace_engine::Engine).
//!
//! [`Config`] says what to serve and how, [`launch`] makes an engine of it, and [`Server`] answers
//! requests with it. Nothing that a client sends, or fails to send, may take unbounded time or memory:
//! every wait has a limit and every buffer a size. Nothing that one tenant does is visible to another
//! through the cache: a tenant's name is part of its requests' salt.

mod answer;
mod auth;
mod body;
mod cache_reset;
mod config;
mod connection;
mod connections;
mod duration;
mod error;
mod exposition;
mod fields;
mod figures;
mod generate;
mod launch;
mod messages;
mod metrics_page;
mod node_figures;
mod page;
mod parameters;
mod reply;
mod request_id;
mod salts;
mod served_model;
mod server;
mod share;
mod state;
mod stop;
mod stream;
mod summary;
mod tokens;
mod tool_calls;
mod tools;
mod truncation;

pub use config::{Config, ConfigError, Key, L3Choice, Limits, Secret};
pub use launch::{LaunchError, Launched, launch};
pub use node_figures::{node_figures, serve_node_figures};
pub use served_model::ServedModel;
pub use server::{BindError, Server};
pub use summary::Summary;
pub use tool_calls::ToolFormat;
