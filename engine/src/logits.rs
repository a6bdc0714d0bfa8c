//! The logits of a step, passed from the model to the sampler.

/// Passes the logits of a step on in groups of rows, in order, so that a step with many rows needs
/// a buffer for only some of them.
pub struct Logits<'a> {
    vocabulary: usize,
    /// Buffer for rows, reused.
    rows: &'a mut Vec<f32>,
    take: &'a mut (dyn FnMut(&[f32]) + Send),
    taken: usize,
}

impl std::fmt::Debug for Logits<'_> {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let mut out = formatter.debug_struct("Logits");
        out.field("vocabulary", &self.vocabulary)
            .field("taken", &self.taken)
            .finish_non_exhaustive()
    }
}

impl<'a> Logits<'a> {
    /// Largest number of rows that a model should compute together.
    pub const ROWS_MAX: usize = 64;

    /// Creates a sink that passes rows of `vocabulary` values to `take`, one or more at a time.
    /// `rows` is the buffer.
    #[must_use]
    pub fn new(
        vocabulary: usize,
        rows: &'a mut Vec<f32>,
        take: &'a mut (dyn FnMut(&[f32]) + Send),
    ) -> Self {
        Self { vocabulary, rows, take, taken: 0 }
    }

    /// Adds `count` rows, which `fill` writes. Their previous content is undefined.
    pub fn add(&mut self, count: usize, fill: impl FnOnce(&mut [f32])) {
        self.rows.resize(count * self.vocabulary, 0.0);
        fill(self.rows);
        (self.take)(self.rows);
        self.taken += count;
    }

    /// Returns the number of rows that were passed on.
    #[must_use]
    pub fn taken(&self) -> usize {
        self.taken
    }
}
