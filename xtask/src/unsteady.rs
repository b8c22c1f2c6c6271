//! Tests that failed and then passed by themselves.
//!
//! On a machine that others use, a test may fail for want of time. One such failure among thousands
//! of tests says nothing about the change that is tested. So a failed test program is run once more,
//! alone. If it passes then, it is named in the summary with all that was seen of its failure, and
//! somebody has to find out why. A run with more than [`MAX`] of them fails.

use std::sync::{Mutex, PoisonError};

use anyhow::{Result, anyhow};

use ferrite_xenhost::steps::{self, say};

/// So many tests of a run may be unsteady.
pub(crate) const MAX: usize = 3;

/// Those of this run.
static FOUND: Mutex<Vec<Unsteady>> = Mutex::new(Vec::new());

/// A test that failed once.
#[derive(Clone, Debug)]
pub(crate) struct Unsteady {
    /// Its name.
    pub(crate) name: String,
    /// How it failed.
    pub(crate) failure: String,
}

/// Gives a test that has failed another try, alone. Its first failure is shown at once.
///
/// # Errors
/// It failed again, and how.
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

/// A test has passed by itself that failed like this before.
pub(crate) fn add(name: &str, failure: String) {
    say(format!("{name} is unsteady: it failed and then passed"));
    let mut found = FOUND.lock().unwrap_or_else(PoisonError::into_inner);
    found.push(Unsteady { name: name.to_owned(), failure });
}

/// All that were found.
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
