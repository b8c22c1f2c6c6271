//! Load that leaves no processor idle.

use ferrite_xenhost::steps;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;

/// A busy thread for each processor, until this is dropped.
pub(crate) struct Burners {
    stop: Arc<AtomicBool>,
    threads: Vec<JoinHandle<()>>,
}

impl Burners {
    pub(crate) fn start() -> Burners {
        let stop = Arc::new(AtomicBool::new(false));
        let burn = |_| {
            let stop = stop.clone();
            std::thread::spawn(move || {
                while !stop.load(Ordering::Relaxed) {
                    std::hint::spin_loop();
                }
            })
        };
        Burners { threads: (0..steps::cpus()).map(burn).collect(), stop }
    }
}

impl Drop for Burners {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        self.threads.drain(..).for_each(|thread| drop(thread.join()));
    }
}
