//! Models of the Llama family on the CPU: the forward pass over paged KV, weights from a folder, from the program or
//! generated, tokenizers and chat templates.
//!
//! The result for a token depends on the tokens up to it and on nothing else, to the bit. No code
//! in this crate may let the order of a sum depend on the batch, on where a span begins, on the
//! number of threads, or on where pages are.
//!
//! ```
//! let loaded = terrace_model::built_in(1);
//! let tokens = loaded.tokenizer.encode("Hi").unwrap();
//! assert_eq!(loaded.tokenizer.decode(&tokens), "Hi");
//! ```

// What only models from folders need is not used without them.
#![cfg_attr(not(feature = "folders"), allow(dead_code))]

mod attention;
mod built_in;
mod byte_tokenizer;
mod chat;
mod conversation;
mod llama;
#[cfg_attr(not(feature = "folders"), path = "load/absent.rs")]
mod load;
mod loaded;
mod math;
mod matrix;
mod product;
mod random;
mod rope;
mod shape;
mod tensor_names;
mod tokenizer;
mod weights;

pub use built_in::{BuiltInAccuracy, built_in, built_in_accuracy, unloaded_built_in};
pub use chat::{ChatError, ChatTemplate};
pub use conversation::{Conversation, FunctionCall, Message, PromptEnd, ToolCall, ToolKind};
pub use llama::Llama;
pub use load::{LoadError, load, load_prompting, load_tokenizer, open};
pub use loaded::{Loaded, Unloaded};
pub use random::{random, shallow, unloaded_random};
pub use rope::{Rope, Scaling};
pub use shape::Shape;
pub use tokenizer::{Decoder, EncodeError, TokenBytes, Tokenizer};
pub use weights::{LayerPart, Part, WeightSource};
