//! Events without requests, as fast as a guest can send them (threats.md T8).

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::thread::JoinHandle;

use ferrite_loopback::front::{FrontQueue, GuestSpace};

/// A port without a queue.
const NOBODY: u32 = 60;

/// A thread of the guest that sends events in a loop, to ports that may change.
pub struct Storm {
    ports: Vec<Arc<AtomicU32>>,
    stop: Arc<AtomicBool>,
    thread: JoinHandle<u64>,
}

impl Storm {
    /// For so many ports; without queues at first.
    pub fn new(space: &Arc<GuestSpace>, ports: usize) -> Storm {
        let ports: Vec<_> = (0..ports).map(|_| Arc::new(AtomicU32::new(NOBODY))).collect();
        let stop = Arc::new(AtomicBool::new(false));
        let (space, to, ended) = (space.clone(), ports.clone(), stop.clone());
        let thread = std::thread::Builder::new().name("storm".into()).spawn(move || {
            let mut sent = 0;
            while !ended.load(Ordering::Relaxed) {
                for port in &to {
                    space.notify(port.load(Ordering::Relaxed)).unwrap();
                    sent += 1;
                }
            }
            sent
        });
        Storm { ports, stop, thread: thread.unwrap() }
    }

    /// Sends to these queues from now on.
    pub fn rage(&self, queues: &[FrontQueue]) {
        let ports = queues.iter().map(FrontQueue::port);
        self.ports.iter().zip(ports).for_each(|(to, port)| to.store(port, Ordering::Relaxed));
    }

    /// Sends to ports without queues, at the same rate.
    pub fn calm(&self) {
        self.ports.iter().for_each(|to| to.store(NOBODY, Ordering::Relaxed));
    }

    /// Ends the thread; the number of sent events.
    pub fn end(self) -> u64 {
        self.stop.store(true, Ordering::Relaxed);
        self.thread.join().unwrap()
    }
}
