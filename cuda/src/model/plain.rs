//! Structures that kernels read: numbers without padding.

#![allow(unsafe_code)]

/// A type without padding for which all bit patterns are valid.
///
/// # Safety
/// The type has no padding, and any bytes of its size are a value of it.
pub(super) unsafe trait Plain: Copy + Default + Send + Sync + 'static {}

// SAFETY: it is a number.
unsafe impl Plain for u32 {}

macro_rules! plain {
    ($($(#[$doc:meta])* $name:ident { $($(#[$field_doc:meta])* $field:ident: $type:ty,)* })*) => {$(
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, Default, PartialEq)]
        #[repr(C)]
        pub(super) struct $name { $($(#[$field_doc])* pub(super) $field: $type,)* }
        // SAFETY: its fields are numbers, and together they are as long as it is.
        unsafe impl Plain for $name {}
        const _: () = assert!(size_of::<$name>() == 0 $(+ size_of::<$type>())*);
    )*};
}

plain! {
    /// A token of a step.
    Token {
        token: u32,
        position: u32,
        /// Place in tokens from the start of the first page, or [`NOWHERE`].
        place: u32,
        unused: u32,
    }
    /// Consecutive entries of a row of the page table.
    Change { row: u32, first_entry: u32, first_page: u32, pages: u32, }
    /// A token that the step before has chosen.
    Awaited { token: u32, output: u32, }
    /// Consecutive tokens of a sequence, and the keys that they attend to.
    Item {
        row: u32,
        first_token: u32,
        tokens: u32,
        position: u32,
        keys_from: u32,
        keys_end: u32,
        /// Place of the partial result, or [`WHOLE`].
        partial: u32,
        unused: u32,
    }
    /// Partial results to join.
    Segments {
        first_token: u32,
        tokens: u32,
        first_partial: u32,
        count: u32,
        /// Units of space for each of them.
        units: u32,
        unused: [u32; 3],
    }
    /// A change to the table of counts: 1 for each occurrence of a token in a row's answer, and
    /// [`OF_PROMPT`] if the prompt contains it.
    Count { row: u32, token: u32, by: u32, }
    /// An addition to a logit.
    Bias { token: u32, bias: f32, }
    /// Changes to the logits of an output.
    Shaping {
        row: u32,
        first_forbidden: u32,
        forbidden: u32,
        first_bias: u32,
        biases: u32,
        awaited: u32,
        /// Row of the table of counts, or [`NONE`].
        counts: u32,
        /// Index of the mask of allowed tokens, or [`NONE`].
        mask: u32,
        output: u32,
        repetition: f32,
        frequency: f32,
        presence: f32,
    }
    /// Sampling parameters of an output.
    Draw {
        temperature: f32,
        top_p: f32,
        min_p: f32,
        top_k: u32,
        /// From 0 to 2^53.
        drawn: u64,
        row: u32,
        is_shaped: u32,
        output: u32,
        unused: u32,
    }
    /// A request for a log-probability: of this token, or of the token that an output has chosen.
    Score { row: u32, token: u32, output: u32, top: u32, }
    /// The log-probability of a token.
    Likelihood { token: u32, logprob: f32, }
    /// Location of pages.
    Pages { kv: u64, page_bytes: u64, layer_offset: u64, table: u64, row_entries: u64, }
}

/// Place of tokens of no sequence.
pub(super) const NOWHERE: u32 = u32::MAX;
/// Marks a final result, which needs no join.
pub(super) const WHOLE: u32 = u32::MAX;
/// Marks a missing index.
pub(super) const NONE: u32 = u32::MAX;
/// Flag in the table of counts: the prompt contains the token.
pub(super) const OF_PROMPT: u32 = 1 << 31;

/// Returns the bytes of some values.
pub(super) fn bytes_of<T: Plain>(all: &[T]) -> &[u8] {
    // SAFETY: the type has no padding, so all bytes are initialised.
    unsafe { std::slice::from_raw_parts(all.as_ptr().cast(), size_of_val(all)) }
}

/// Returns the first value of a byte slice.
pub(super) fn read<T: Plain>(bytes: &[u8]) -> T {
    assert!(bytes.len() >= size_of::<T>(), "{} bytes are too few", bytes.len());
    // SAFETY: the slice is long enough, any bytes are a value, and the read may be unaligned.
    unsafe { bytes.as_ptr().cast::<T>().read_unaligned() }
}
