//! An inference server: an OpenAI-compatible HTTP API in front of an
//! [`Engine`](terrace_engine::Engine).
//!
//! [`Config`] says what to serve and how, [`launch`] creates an engine from it, and [`Server`]
//! answers requests with it. Nothing that a client sends, or fails to send, may take unbounded time
//! or memory: every wait has a limit and every buffer a size. Tenants cannot observe each other
//! through the cache: a tenant's name is part of the salt of its requests.

mod answer;
mod auth;
mod body;
mod cache_reset;
mod cluster;
mod config;
mod connection;
mod connections;
mod cors;
mod disk_tier;
mod echo;
mod error;
mod fields;
mod generate;
mod gpu;
mod history;
#[cfg(feature = "models")]
mod hub;
mod kv_events;
mod l3_tier;
mod launch;
mod logprobs;
mod messages;
mod metrics;
mod openapi;
mod page;
mod parameters;
mod planting;
mod reasoning;
mod recordings;
mod refused;
mod reply;
mod request_id;
mod responses;
mod route;
mod salts;
mod sampling_fields;
mod served_model;
mod server;
mod share;
mod state;
mod stop;
mod stream;
mod structured;
mod summary;
mod tokens;
mod tool_calls;
mod tools;
mod truncation;

pub use cluster::ClusterError;
pub use config::{
    ClientSettings, Config, ConfigError, Configuration, DeviceChoice, Form, Key, L3Choice, Limits,
    NodeSettings, RouteSettings, Secret, Setting, WorkerPlace,
};
pub use gpu::{GpuFigures, GpuWatch, LinkFigures};
#[cfg(feature = "models")]
pub use hub::{Downloaded, Hub, HubError, HubModel, Needed};
pub use launch::{LaunchError, Launched, Progress, launch, launch_telling, wait_for_gpus};
pub use metrics::serve_node_figures;
pub use planting::Planting;
pub use route::{RouteError, RouterServer};
pub use served_model::ServedModel;
pub use server::{BindError, Server};
pub use summary::Summary;
pub use terrace_replay::Size;
pub use tool_calls::ToolFormat;
