//! Tests that failed and then passed by themselves.
//!
//! On a shared machine, a test may fail for lack of time. One such failure among thousands of tests does not concern
//! the change under test. So a failed test program is run once more, alone. If it passes then, the summary names it
//! with the details of its failure, and it has to be investigated. A run with more than [`MAX`] of them fails.

use std::sync::{Mutex, PoisonError};

use anyhow::{Result, anyhow};

use ferrite_xenhost::steps::{self, say};

/// The most unsteady tests of a run.
pub(crate) const MAX: usize = 3;

/// The unsteady tests of this run.
static FOUND: Mutex<Vec<Unsteady>> = Mutex::new(Vec::new());

/// A test that failed once.
#[derive(Clone, Debug)]
pub(crate) struct Unsteady {
    /// Its name.
    pub(crate) name: String,
    /// Its failure.
    pub(crate) failure: String,
}

/// Runs a failed test once more, alone. Its first failure is shown at once.
///
/// # Errors
/// The second failure.
pub(crate) fn try_again(
    name: &str,
    failure: &anyhow::Error,
    again: impl FnOnce() -> Result<()>,
) -> Result<()> {
    let failure = steps::chain(failure);
    say(format!("{name} FAILED, and is run once more by itself\n{failure}"));
    again().map_err(|second| anyhow!("twice\n{failure}\n{}", steps::chain(&second)))?;
    add(name, failure);
    Ok(())
}

/// Records a test that has passed alone after this failure.
pub(crate) fn add(name: &str, failure: String) {
    say(format!("{name} is unsteady: it failed and then passed"));
    let mut found = FOUND.lock().unwrap_or_else(PoisonError::into_inner);
    found.push(Unsteady { name: name.to_owned(), failure });
}

/// All unsteady tests.
pub(crate) fn found() -> Vec<Unsteady> {
    FOUND.lock().unwrap_or_else(PoisonError::into_inner).clone()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_test_that_passes_by_itself_is_named_and_one_that_fails_again_is_an_error() {
        let named = |name: &str| found().iter().filter(|found| found.name == name).count();
        let first = anyhow!("slow");
        try_again("passes", &first, || Ok(())).unwrap();
        assert_eq!(named("passes"), 1);
        let both = try_again("fails", &first, || Err(anyhow!("wrong"))).unwrap_err().to_string();
        assert_eq!(named("fails"), 0);
        assert!(both.contains("slow") && both.contains("wrong"), "{both}");
    }
}
