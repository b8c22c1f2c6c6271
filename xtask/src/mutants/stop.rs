//! Ctrl-C: the running test is ended, and the results so far are reported.

use std::ffi::c_int;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use anyhow::{Context, Result};
use signal_hook::consts::{SIGINT, SIGTERM};
use signal_hook::flag::{register, register_conditional_default};

/// While it lives, the first signal is only recorded.
pub(super) struct Stop(Arc<AtomicBool>);

const SIGNALS: [c_int; 2] = [SIGINT, SIGTERM];

impl Stop {
    pub(super) fn listen() -> Result<Stop> {
        let asked = Arc::new(AtomicBool::new(false));
        for signal in SIGNALS {
            // In this order: the first signal finds the flag clear, the second one finds it set.
            register_conditional_default(signal, asked.clone())
                .and_then(|_| register(signal, asked.clone()))
                .context("cannot listen to signals")?;
        }
        Ok(Stop(asked))
    }

    pub(super) fn is_asked(&self) -> bool {
        self.0.load(Ordering::Relaxed)
    }
}

impl Drop for Stop {
    /// Restores the former effect of signals.
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}
