//! Events without requests, as fast as a guest can send them (threats.md T8).

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::thread::JoinHandle;

use ferrite_loopback::front::{FrontQueue, GuestSpace};

/// A port that no queue is behind.
const NOBODY: u32 = 60;

/// A thread of the guest's that sends events without end, to ports that may change.
pub struct Storm {
    ports: Vec<Arc<AtomicU32>>,
    stop: Arc<AtomicBool>,
    thread: JoinHandle<u64>,
}

impl Storm {
    /// For so many ports; to nobody so far.
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

    /// From now on to these queues.
    pub fn rage(&self, queues: &[FrontQueue]) {
        let ports = queues.iter().map(FrontQueue::port);
        self.ports.iter().zip(ports).for_each(|(to, port)| to.store(port, Ordering::Relaxed));
    }

    /// The same work, and it reaches nobody.
    pub fn calm(&self) {
        self.ports.iter().for_each(|to| to.store(NOBODY, Ordering::Relaxed));
    }

    /// The events that it has sent.
    pub fn end(self) -> u64 {
        self.stop.store(true, Ordering::Relaxed);
        self.thread.join().unwrap()
    }
}
