//! What kernels read, as they read it: structures of numbers without gaps.

#![allow(unsafe_code)]

/// Numbers without gaps, of which any bytes are some.
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
        /// In tokens from the first page's beginning on, or [`NOWHERE`].
        place: u32,
        unused: u32,
    }
    /// Consecutive entries of a row of the page table.
    Change { row: u32, first_entry: u32, first_page: u32, pages: u32, }
    /// A token that the step before has chosen.
    Awaited { token: u32, output: u32, }
    /// Consecutive tokens of a sequence, and which keys they look at.
    Item {
        row: u32,
        first_token: u32,
        tokens: u32,
        position: u32,
        keys_from: u32,
        keys_end: u32,
        /// Where what was found is put for others to be joined to it, or [`WHOLE`].
        partial: u32,
        unused: u32,
    }
    /// Partial results that belong together.
    Segments {
        first_token: u32,
        tokens: u32,
        first_partial: u32,
        count: u32,
        /// Of room, for each of them.
        units: u32,
        unused: [u32; 3],
    }
    /// A change of the table of counts: by one for each time that the answer of a row has a token, and by
    /// [`OF_PROMPT`] if its prompt has it.
    Count { row: u32, token: u32, by: u32, }
    /// What is added to a logit.
    Bias { token: u32, bias: f32, }
    /// What changes the logits of an output.
    Shaping {
        row: u32,
        first_forbidden: u32,
        forbidden: u32,
        first_bias: u32,
        biases: u32,
        awaited: u32,
        /// The row of the table of counts, or [`NONE`].
        counts: u32,
        /// Which of the masks says what is allowed, or [`NONE`].
        mask: u32,
        output: u32,
        repetition: f32,
        frequency: f32,
        presence: f32,
    }
    /// How the token of an output is drawn.
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
    /// A token whose probability is wanted: this one, or what an output has chosen.
    Score { row: u32, token: u32, output: u32, top: u32, }
    /// How likely a token was.
    Likelihood { token: u32, logprob: f32, }
    /// Where pages are, as kernels are told it.
    Pages { kv: u64, page_bytes: u64, layer_offset: u64, table: u64, row_entries: u64, }
}

/// The place of tokens of no sequence.
pub(super) const NOWHERE: u32 = u32::MAX;
/// What needs no joining.
pub(super) const WHOLE: u32 = u32::MAX;
/// No output, or nothing else of its kind.
pub(super) const NONE: u32 = u32::MAX;
/// In the table of counts, says that the prompt has a token.
pub(super) const OF_PROMPT: u32 = 1 << 31;

/// The bytes of some.
pub(super) fn bytes_of<T: Plain>(all: &[T]) -> &[u8] {
    // SAFETY: without gaps, all bytes of them are initialised.
    unsafe { std::slice::from_raw_parts(all.as_ptr().cast(), size_of_val(all)) }
}

/// The first value in some bytes, which are at least as long.
pub(super) fn read<T: Plain>(bytes: &[u8]) -> T {
    assert!(bytes.len() >= size_of::<T>(), "{} bytes are too few", bytes.len());
    // SAFETY: there are as many bytes, any bytes are a value, and they need not be aligned.
    unsafe { bytes.as_ptr().cast::<T>().read_unaligned() }
}
