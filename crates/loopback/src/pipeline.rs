//! The least that two processes need when one does the other's disk I/O, as the baseline for a backend in a process of
//! its own.
//!
//! The front writes words to shared memory, each a request, and gets words back. Data are in the same memory, in the
//! order of the places that requests name, and the back copies them once. Two eventfds wake a side that announces that
//! it sleeps. There is nothing else: no grants, no checks of the other side, no bookkeeping. Both sides are ours.

use std::io;
use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering, fence};
use std::time::Duration;

use ferrite_io::arena::{Arena, Span};
use rustix::event::{PollFd, PollFlags, Timespec};

use super::guest::{Descriptors, signal};
use super::memory::GuestMemory;
use super::{GuestHandle, GuestOptions, LoopbackError};
use ferrite_xen::hypervisor::{DomId, PAGE_SIZE};

/// The only channel.
const PORT: u32 = 0;

// The offsets of the shared words, on cache lines of their own.
const REQUESTS: usize = 0;
const BACK_SLEEPS: usize = 8;
const ANSWERS: usize = 16;
const FRONT_SLEEPS: usize = 24;
const SLOTS: usize = 32;

/// A word has the place from bit 48 on; below it the sector, or whether the request succeeded.
const PLACE_SHIFT: u32 = 48;
const WRITE: u64 = 1 << 47;

/// The dimensions of a pipeline.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shape {
    /// Places, which is also the most requests in flight.
    pub places: u16,
    /// Pages of each place.
    pub pages: u32,
}

impl Shape {
    /// The memory that both sides share, with the eventfds.
    ///
    /// # Errors
    /// The kernel gives no memory or no descriptors.
    pub fn create(self) -> Result<GuestHandle, LoopbackError> {
        let frames = self.data_frame() + u32::from(self.places) * self.pages;
        GuestHandle::create(DomId(1), GuestOptions { frames, grants: 1, ports: 1 })
    }

    /// Slots of each direction: at least as many as places.
    fn slots(self) -> usize {
        usize::from(self.places).next_power_of_two()
    }

    fn words(self) -> usize {
        SLOTS + 2 * self.slots()
    }

    /// The first frame with data.
    fn data_frame(self) -> u32 {
        (self.words() * size_of::<u64>()).div_ceil(PAGE_SIZE) as u32
    }

    fn place_bytes(self) -> usize {
        self.pages as usize * PAGE_SIZE
    }
}

/// The state of both sides.
struct Shared {
    memory: GuestMemory,
    descriptors: Arc<Descriptors>,
    shape: Shape,
}

impl Shared {
    fn attach(handle: &GuestHandle, shape: Shape) -> Result<Shared, LoopbackError> {
        let memory = handle.map()?;
        let frames = memory.layout().frames;
        let wanted = shape.data_frame() + u32::from(shape.places) * shape.pages;
        if frames < wanted {
            return Err(LoopbackError::NotAGuest(format!("it has {frames} frames, not {wanted}")));
        }
        Ok(Shared { memory, descriptors: handle.descriptors().clone(), shape })
    }

    fn word(&self, i: usize) -> &AtomicU64 {
        assert!(i < self.shape.words());
        // SAFETY: the words lie in the first frames, whose presence `attach` has checked. They are aligned, mapped as
        // long as `self`, and only ever accessed atomically.
        unsafe { AtomicU64::from_ptr(self.memory.frame(0).as_ptr().cast::<u64>().add(i)) }
    }

    fn request(&self, i: u64) -> &AtomicU64 {
        self.word(SLOTS + (i as usize & (self.shape.slots() - 1)))
    }

    fn answer(&self, i: u64) -> &AtomicU64 {
        self.word(SLOTS + self.shape.slots() + (i as usize & (self.shape.slots() - 1)))
    }

    /// Requests an event with the other side's next word; returns whether a word is there already.
    fn final_check(&self, sleeps: usize, head: usize, taken: u64) -> bool {
        if self.word(head).load(Ordering::Acquire) != taken {
            return true;
        }
        self.word(sleeps).store(1, Ordering::Relaxed);
        // Either this side sees the word, or the other one sees that this side sleeps.
        fence(Ordering::SeqCst);
        self.word(head).load(Ordering::Acquire) != taken
    }

    /// Publishes the written words; returns whether the other side wants an event.
    fn publish(&self, head: usize, upto: u64, sleeps: usize) -> bool {
        self.word(head).store(upto, Ordering::Release);
        fence(Ordering::SeqCst);
        let asleep = self.word(sleeps).load(Ordering::Relaxed) != 0;
        if asleep {
            self.word(sleeps).store(0, Ordering::Relaxed);
        }
        asleep
    }
}

/// The side that makes requests.
pub struct Front {
    shared: Shared,
    written: u64,
    published: u64,
    taken: u64,
}

impl Front {
    /// Attaches the front.
    ///
    /// # Errors
    /// The memory cannot be mapped, or has another shape.
    pub fn attach(handle: &GuestHandle, shape: Shape) -> Result<Front, LoopbackError> {
        let shared = Shared::attach(handle, shape)?;
        Ok(Front { shared, written: 0, published: 0, taken: 0 })
    }

    /// Fills the data of all places with words from `next`.
    pub fn fill(&self, mut next: impl FnMut() -> u64) {
        let shape = self.shared.shape;
        let frames = u32::from(shape.places) * shape.pages;
        for frame in 0..frames {
            let page = self.shared.memory.frame(shape.data_frame() + frame).cast::<u64>();
            for i in 0..PAGE_SIZE / size_of::<u64>() {
                // SAFETY: inside the frame, aligned; the back reads it only after a request.
                unsafe { page.add(i).write_volatile(next()) }
            }
        }
    }

    /// Writes a request for an idle place.
    pub fn send(&mut self, place: u16, sector: u64, write: bool) {
        let way = if write { WRITE } else { 0 };
        let word = u64::from(place) << PLACE_SHIFT | way | sector;
        self.shared.request(self.written).store(word, Ordering::Relaxed);
        self.written += 1;
    }

    /// Publishes the written requests.
    ///
    /// # Errors
    /// The kernel's, of the event.
    pub fn push(&mut self) -> io::Result<()> {
        if self.written == self.published {
            return Ok(());
        }
        self.published = self.written;
        match self.shared.publish(REQUESTS, self.written, BACK_SLEEPS) {
            true => signal(self.shared.descriptors.to_back(PORT)),
            false => Ok(()),
        }
    }

    /// Requests without an answer.
    pub fn in_flight(&self) -> usize {
        (self.written - self.taken) as usize
    }

    /// Whether an answer is there.
    pub fn has_answer(&self) -> bool {
        self.shared.word(ANSWERS).load(Ordering::Acquire) != self.taken
    }

    /// The next answer: its place, and whether the request succeeded.
    pub fn take(&mut self) -> Option<(u16, bool)> {
        if !self.has_answer() {
            return None;
        }
        let word = self.shared.answer(self.taken).load(Ordering::Relaxed);
        self.taken += 1;
        Some(((word >> PLACE_SHIFT) as u16, word & 1 == 1))
    }

    /// Requests an event with the next answer; returns whether one is there.
    pub fn final_check(&self) -> bool {
        self.shared.final_check(FRONT_SLEEPS, ANSWERS, self.taken)
    }

    /// Sleeps until an event comes, or for at most this time.
    ///
    /// # Errors
    /// The kernel's.
    pub fn sleep(&self, timeout: Duration) -> io::Result<()> {
        let event = self.shared.descriptors.to_front(PORT);
        let mut fds = [PollFd::from_borrowed_fd(event, PollFlags::IN)];
        let timeout = Timespec {
            tv_sec: timeout.as_secs() as i64,
            tv_nsec: i64::from(timeout.subsec_nanos()),
        };
        match rustix::event::poll(&mut fds, Some(&timeout)) {
            Ok(0) | Err(rustix::io::Errno::INTR) => Ok(()),
            Ok(_) => take_event(event),
            Err(e) => Err(e.into()),
        }
    }
}

/// A request, on the back's side.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Request {
    /// The place of its data.
    pub place: u16,
    /// Its sector on the disk.
    pub sector: u64,
    /// Whether it is a write.
    pub write: bool,
}

/// The side that has the disk.
pub struct Back {
    shared: Shared,
    taken: u64,
    written: u64,
    published: u64,
}

impl Back {
    /// Attaches the back.
    ///
    /// # Errors
    /// The memory cannot be mapped, or has another shape.
    pub fn attach(handle: &GuestHandle, shape: Shape) -> Result<Back, LoopbackError> {
        let shared = Shared::attach(handle, shape)?;
        Ok(Back { shared, taken: 0, written: 0, published: 0 })
    }

    /// Whether a request is there.
    pub fn has_request(&self) -> bool {
        self.shared.word(REQUESTS).load(Ordering::Acquire) != self.taken
    }

    /// The next request.
    pub fn take(&mut self) -> Option<Request> {
        if !self.has_request() {
            return None;
        }
        let word = self.shared.request(self.taken).load(Ordering::Relaxed);
        self.taken += 1;
        let (place, below) = ((word >> PLACE_SHIFT) as u16, word & ((1 << PLACE_SHIFT) - 1));
        Some(Request { place, sector: below & !WRITE, write: below & WRITE != 0 })
    }

    /// Copies a place's data to the arena.
    pub fn fetch(&self, place: u16, arena: &Arena, to: Span) {
        let bytes = self.check(place, to);
        // SAFETY: both are mapped memory of that size, of different objects. The front may change the bytes meanwhile:
        // nothing depends on them (see memory.rs).
        unsafe { arena.ptr(to).copy_from_nonoverlapping(self.data(place), bytes) }
    }

    /// Copies data from the arena to a place.
    pub fn deliver(&self, place: u16, arena: &Arena, from: Span) {
        let bytes = self.check(place, from);
        // SAFETY: as in `fetch`.
        unsafe { self.data(place).copy_from_nonoverlapping(arena.ptr(from), bytes) }
    }

    fn check(&self, place: u16, span: Span) -> usize {
        assert!(place < self.shared.shape.places && span.len() <= self.shared.shape.place_bytes());
        span.len()
    }

    fn data(&self, place: u16) -> std::ptr::NonNull<u8> {
        let shape = self.shared.shape;
        self.shared.memory.frame(shape.data_frame() + u32::from(place) * shape.pages)
    }

    /// Writes an answer.
    pub fn answer(&mut self, place: u16, ok: bool) {
        let word = u64::from(place) << PLACE_SHIFT | u64::from(ok);
        self.shared.answer(self.written).store(word, Ordering::Relaxed);
        self.written += 1;
    }

    /// Publishes the written answers.
    ///
    /// # Errors
    /// The kernel's, of the event.
    pub fn push(&mut self) -> io::Result<()> {
        if self.written == self.published {
            return Ok(());
        }
        self.published = self.written;
        match self.shared.publish(ANSWERS, self.written, FRONT_SLEEPS) {
            true => signal(self.shared.descriptors.to_front(PORT)),
            false => Ok(()),
        }
    }

    /// Requests an event with the next request; returns whether one is there.
    pub fn final_check(&self) -> bool {
        self.shared.final_check(BACK_SLEEPS, REQUESTS, self.taken)
    }

    /// Readable when an event has come.
    pub fn event_fd(&self) -> BorrowedFd<'_> {
        self.shared.descriptors.to_back(PORT)
    }

    /// Takes a pending event.
    ///
    /// # Errors
    /// The kernel's.
    pub fn take_event(&self) -> io::Result<()> {
        take_event(self.event_fd())
    }
}

/// Wakes the back of this pipeline from any wait.
///
/// # Errors
/// The kernel's.
pub fn wake_back(handle: &GuestHandle) -> io::Result<()> {
    signal(handle.descriptors().to_back(PORT))
}

fn take_event(event: BorrowedFd<'_>) -> io::Result<()> {
    match rustix::io::read(event, &mut [0; 8]) {
        Ok(_) | Err(rustix::io::Errno::AGAIN | rustix::io::Errno::INTR) => Ok(()),
        Err(e) => Err(e.into()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SHAPE: Shape = Shape { places: 3, pages: 2 };

    fn both() -> (GuestHandle, Front, Back) {
        let handle = SHAPE.create().unwrap();
        let front = Front::attach(&handle, SHAPE).unwrap();
        let back = Back::attach(&handle, SHAPE).unwrap();
        (handle, front, back)
    }

    #[test]
    fn requests_and_answers_arrive_in_order_when_they_are_published() {
        let (_handle, mut front, mut back) = both();
        // The slots go round several times.
        for round in 0..20 {
            front.send(2, round, false);
            front.send(0, (1 << 46) + round, true);
            assert_eq!(back.take(), None);
            front.push().unwrap();
            assert_eq!(back.take(), Some(Request { place: 2, sector: round, write: false }));
            let sector = (1 << 46) + round;
            assert_eq!(back.take(), Some(Request { place: 0, sector, write: true }));
            assert_eq!((back.take(), front.in_flight()), (None, 2));
            back.answer(0, true);
            back.answer(2, false);
            assert_eq!(front.take(), None);
            back.push().unwrap();
            assert_eq!([front.take(), front.take()], [Some((0, true)), Some((2, false))]);
            assert_eq!((front.take(), front.in_flight()), (None, 0));
        }
    }

    #[test]
    fn an_event_comes_once_for_each_time_that_it_was_asked_for() {
        let (_handle, mut front, mut back) = both();
        let came = |back: &Back| rustix::io::read(back.event_fd(), &mut [0; 8]).is_ok();
        front.send(0, 0, false);
        front.push().unwrap();
        assert!(!came(&back), "no event was asked for");
        assert!(back.final_check(), "one is there");
        back.take().unwrap();
        assert!(!back.final_check());
        front.send(1, 0, false);
        front.push().unwrap();
        assert!(came(&back));
        front.send(2, 0, false);
        front.push().unwrap();
        assert!(!came(&back), "it was asked for once");
        back.answer(0, true);
        back.push().unwrap();
        assert!(front.take().is_some() && !front.final_check());
        back.answer(1, true);
        back.push().unwrap();
        front.sleep(Duration::from_secs(30)).unwrap();
        assert!(front.has_answer());
    }

    #[test]
    fn each_place_has_data_of_its_own() {
        let (_handle, front, back) = both();
        let mut next = 0;
        front.fill(|| {
            next += 1;
            next
        });
        let arena = Arena::new(4 * PAGE_SIZE).unwrap();
        let (a, b) = (arena.span(0, 2 * PAGE_SIZE), arena.span(2 * PAGE_SIZE, 2 * PAGE_SIZE));
        back.fetch(1, &arena, a);
        let mut first = [0; 8];
        arena.copy_out(a.slice(0, 8), &mut first);
        assert_eq!(u64::from_ne_bytes(first), 1025, "the words of place 1");
        back.deliver(2, &arena, a);
        back.fetch(2, &arena, b);
        arena.copy_out(b.slice(0, 8), &mut first);
        assert_eq!(u64::from_ne_bytes(first), 1025);
        back.fetch(0, &arena, b);
        arena.copy_out(b.slice(0, 8), &mut first);
        assert_eq!(u64::from_ne_bytes(first), 1);
    }

    #[test]
    fn memory_of_another_shape_is_refused() {
        let handle = SHAPE.create().unwrap();
        assert!(Back::attach(&handle, Shape { places: 4, ..SHAPE }).is_err());
        assert!(Front::attach(&handle, Shape { pages: 3, ..SHAPE }).is_err());
    }
}
