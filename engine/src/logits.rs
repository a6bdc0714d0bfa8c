//! The logits of a step on their way from the model to those who choose tokens by them.

/// Takes the logits of a step some rows at a time, in order, so that a step which wants many rows needs
/// memory for some of them only.
pub struct Logits<'a> {
    vocabulary: usize,
    /// Memory for rows, which is used again.
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
    /// As many rows as a model should compute together at the most.
    pub const ROWS_MAX: usize = 64;

    /// Gives rows of `vocabulary` values to `take`, one or more at a time; `rows` is memory to do it in.
    #[must_use]
    pub fn new(
        vocabulary: usize,
        rows: &'a mut Vec<f32>,
        take: &'a mut (dyn FnMut(&[f32]) + Send),
    ) -> Self {
        Self { vocabulary, rows, take, taken: 0 }
    }

    /// The next `count` rows, which `fill` writes. What is in them before has no meaning.
    pub fn add(&mut self, count: usize, fill: impl FnOnce(&mut [f32])) {
        self.rows.resize(count * self.vocabulary, 0.0);
        fill(self.rows);
        (self.take)(self.rows);
        self.taken += count;
    }

    /// How many rows were taken.
    #[must_use]
    pub fn taken(&self) -> usize {
        self.taken
    }
}
