//! Names of choices, as people write them in flags, files and logs.

/// Returns true if a text is a name. Hyphens and underscores do not matter: `write-through`, `write_through` and
/// `writethrough` are one name, so that every program accepts what another prints.
///
/// ```
/// assert!(terrace_cache::is_name_of("s3_fifo", "s3-fifo"));
/// assert!(!terrace_cache::is_name_of("fifo", "s3-fifo"));
/// ```
#[must_use]
pub fn is_name_of(text: &str, name: &str) -> bool {
    let letters = |name: &'_ str| name.replace(['-', '_'], "");
    letters(text) == letters(name)
}
