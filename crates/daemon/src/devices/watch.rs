//! Hears of the end of a device's connections or worker, and gives the kernel new ones.
//!
//! One thread does that for all devices. It sleeps until a connection ends, and tries again after growing pauses while a
//! disk cannot be connected to. It ends with the last device.

use std::collections::BTreeMap;
use std::os::fd::AsFd as _;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use ferrite_serve::waker::Waker;
use rustix::event::{PollFd, PollFlags, Timespec, poll};

use super::kernel::{self, Again};
use super::{Device, Name, forget};
use crate::Shared;
use crate::state::States;

/// The pauses between tries.
const FIRST: Duration = Duration::from_millis(100);
const LONGEST: Duration = Duration::from_secs(5);

/// The thread, while there are devices.
#[derive(Default)]
pub(super) struct Watching {
    /// Wakes it, to look at all devices.
    thread: Mutex<Option<Arc<Waker>>>,
}

/// Has the thread watch the devices that there are now.
pub(super) fn begin(shared: &Arc<Shared>) {
    let mut thread = shared.devices.watching.thread.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(waker) = &*thread {
        return waker.wake();
    }
    let started = Waker::new().map(Arc::new).and_then(|waker| {
        let (shared, own) = (shared.clone(), waker.clone());
        let builder = std::thread::Builder::new().name("devices".to_owned());
        builder.spawn(move || watch(&shared, &own))?;
        Ok(waker)
    });
    match started {
        Ok(waker) => *thread = Some(waker),
        Err(e) => tracing::warn!("devices are not connected again after a keeper's end: {e}"),
    }
}

fn watch(shared: &Arc<Shared>, waker: &Waker) {
    let mut pause = FIRST;
    loop {
        waker.clear();
        pause = match connect_all(shared) {
            true => FIRST,
            false => (pause * 2).min(LONGEST),
        };
        let needs_more = shared.devices.lock().values().any(|device| device.streams.is_empty());
        wait(shared, waker, needs_more.then_some(pause));
        if shared.is_stopped(Duration::ZERO) || ends(shared) {
            return;
        }
    }
}

/// Whether there are no devices any more. The next one starts another thread then.
fn ends(shared: &Shared) -> bool {
    let mut thread = shared.devices.watching.thread.lock().unwrap_or_else(PoisonError::into_inner);
    let ends = shared.devices.lock().is_empty();
    if ends {
        *thread = None;
    }
    ends
}

/// Waits until a connection ends, there is another device, or the daemon stops. Ended connections are dropped.
fn wait(shared: &Shared, waker: &Waker, timeout: Option<Duration>) {
    // Copies, so that devices can be made and removed meanwhile.
    let mut streams = Vec::new();
    for (index, device) in shared.devices.lock().iter() {
        let copies = device.streams.iter().filter_map(|stream| stream.try_clone().ok());
        streams.extend(copies.map(|stream| (*index, stream)));
    }
    let mut fds = vec![
        PollFd::from_borrowed_fd(waker.fd(), PollFlags::IN),
        PollFd::from_borrowed_fd(shared.stop.fd(), PollFlags::IN),
    ];
    // The end is told without being asked for. The kernel reads the data that arrive.
    fds.extend(streams.iter().map(|(_, s)| PollFd::from_borrowed_fd(s.as_fd(), PollFlags::RDHUP)));
    let timeout = timeout
        .map(|t| Timespec { tv_sec: t.as_secs() as i64, tv_nsec: i64::from(t.subsec_nanos()) });
    if poll(&mut fds, timeout.as_ref()).is_err() {
        return;
    }
    let ended = |fd: &PollFd<'_>| !fd.revents().is_empty();
    let mut known = shared.devices.lock();
    for ((index, _), _) in streams.iter().zip(&fds[2..]).filter(|(_, fd)| ended(fd)) {
        if let Some(device) = known.get_mut(index) {
            device.streams.clear();
        }
    }
}

/// Gives new connections to each device that has lost its own, and removes those whose disk is gone. Returns whether all
/// are connected.
fn connect_all(shared: &Arc<Shared>) -> bool {
    let without = |known: &BTreeMap<Name, Device>| -> Vec<Name> {
        known.iter().filter(|(_, d)| d.streams.is_empty()).map(|(name, _)| *name).collect()
    };
    let all = without(&shared.devices.lock());
    let unconnected = all.into_iter().filter(|name| !connect(shared, *name)).count();
    unconnected == 0
}

fn connect(shared: &Arc<Shared>, name: Name) -> bool {
    let _one = shared.devices.change();
    let record = shared.devices.lock().get(&name).map(|device| device.record.clone());
    let Some(record) = record else { return true };
    let path = name.path();
    let path = path.display();
    if !shared.table.read(|disks| disks.contains_key(&record.disk)) {
        if States::peek(&shared.paths.states(), record.disk).is_some() {
            // It has not come back yet after the daemon's start.
            return false;
        }
        tracing::warn!("{path} is removed: its disk {} is detached", record.disk);
        if let Err(e) = kernel::remove(&record) {
            tracing::warn!("{path} is not removed: {e}");
        }
        forget(shared, name, &record);
        return true;
    }
    match kernel::connect(shared, &record, name.index) {
        Again::Connected(streams) => {
            if let Some(device) = shared.devices.lock().get_mut(&name) {
                device.streams = streams;
            }
            true
        }
        Again::Waits => false,
        Again::Gone => {
            tracing::warn!("{path} was removed by another program");
            forget(shared, name, &record);
            true
        }
    }
}
