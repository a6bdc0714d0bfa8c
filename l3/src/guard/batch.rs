//! Splitting a batch into the part that the store is asked for, and merging the results.

use std::io;

use tokio::task::JoinError;

use crate::store::{Results, StoreError};

/// Removes the objects that `skip` selects from a batch. The flags say which were removed.
pub fn split<O>(batch: Vec<O>, mut skip: impl FnMut(&O) -> bool) -> (Vec<O>, Vec<bool>) {
    let skipped: Vec<bool> = batch.iter().map(&mut skip).collect();
    let mut is_skipped = skipped.iter();
    let asked = batch.into_iter().filter(|_| is_skipped.next() == Some(&false)).collect();
    (asked, skipped)
}

/// Merges the results of the objects that were asked for with `instead` for each that was skipped.
pub fn merge<T: Clone>(
    skipped: &[bool],
    asked: Results<T>,
    instead: &Result<T, StoreError>,
) -> Results<T> {
    let mut asked = asked.into_iter();
    let mut next = || asked.next().expect("one result for each object asked for");
    skipped.iter().map(|skipped| if *skipped { instead.clone() } else { next() }).collect()
}

/// Returns the results if there is one per object. Otherwise they cannot be assigned, and all have
/// failed.
pub fn one_each<T: Clone>(results: Results<T>, objects: usize) -> Results<T> {
    if results.len() == objects {
        return results;
    }
    let message = format!("{} results for {objects} objects", results.len());
    let error = io::Error::new(io::ErrorKind::InvalidData, message);
    vec![Err(StoreError::io("calling the store", &error)); objects]
}

/// Error of a call whose task died, because the store panicked or its runtime was shut down.
pub fn died(error: JoinError) -> StoreError {
    StoreError::io("calling the store", &error.into())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn skipped_objects_keep_their_position() {
        let (asked, skipped) = split(vec![1, 2, 3, 4], |number| number % 2 == 0);
        assert_eq!(asked, [1, 3]);
        let asked = vec![Ok("one"), Err(StoreError::Full)];
        assert_eq!(
            merge(&skipped, asked, &Err(StoreError::Missing)),
            [Ok("one"), Err(StoreError::Missing), Err(StoreError::Full), Err(StoreError::Missing)]
        );
    }

    #[test]
    fn a_wrong_number_of_results_is_a_failure() {
        assert_eq!(one_each(vec![Ok(1)], 1), [Ok(1)]);
        for wrong in [vec![], vec![Ok(1)], vec![Ok(1); 3]] {
            let results = one_each(wrong, 2);
            assert_eq!(results.len(), 2);
            assert!(results.iter().all(|result| result.as_ref().unwrap_err().is_unwell()));
        }
    }
}
