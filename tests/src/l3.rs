//! What tests of stores share: objects whose bytes follow from their names, a suite that every backend
//! passes, and a disk that crashes.

pub mod objects;
