//! The lifecycle of a request, as one program.

mod lifecycle;
mod trace;
