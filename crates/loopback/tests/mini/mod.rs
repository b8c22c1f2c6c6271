//! The smallest backend that a frontend accepts: one thread, a disk in memory, requests answered
//! in order. It trusts its frontend; the real one is in another crate.

use std::os::fd::AsFd;
use std::sync::Arc;

use ferrite_io::arena::{Arena, Span};
use ferrite_loopback::machine::DiskPaths;
use ferrite_xen::abi::{
    IndirectOp, MAX_INDIRECT_PAGES, Message, PlainOp, Protocol, RawSegment, Request, Response,
    SEGMENT_BYTES, SEGMENTS_PER_INDIRECT_PAGE, STATUS_ERROR, STATUS_NOT_SUPPORTED, STATUS_OKAY,
};
use ferrite_xen::hypervisor::{CopySegment, Direction, GrantRef, Hypervisor, PAGE_SIZE};
use ferrite_xen::mover::Moving;
use ferrite_xen::ring::BackRing;
use ferrite_xen::store::Store;
use rustix::event::{PollFd, PollFlags, Timespec};

pub(crate) const DISK_BYTES: usize = 8 << 20;
const MAX_SEGMENTS: usize = 256;

pub(crate) struct Mini {
    store: Store,
    disk: DiskPaths,
    arena: Arc<Arena>,
    queues: Vec<BackRing>,
    protocol: Protocol,
    state: u32,
    /// Stops for ever, with the request consumed and not answered, at a write to this sector.
    pub(crate) stall_at: Option<u64>,
}

impl Mini {
    pub(crate) fn new(store: Store, disk: DiskPaths) -> Mini {
        // The disk, and behind it room for descriptors.
        let arena = Arena::new(DISK_BYTES + MAX_INDIRECT_PAGES * PAGE_SIZE).unwrap();
        let protocol = Protocol::X86_32;
        Mini { store, disk, arena, queues: Vec::new(), protocol, state: 0, stall_at: None }
    }

    fn put(&mut self, key: &str, value: impl ToString) {
        let path = format!("{}/{key}", self.disk.backend);
        self.store.write(&path, value.to_string().as_bytes()).unwrap();
    }

    fn own(&mut self, key: &str) -> Option<String> {
        self.store.read_string(&format!("{}/{key}", self.disk.backend)).unwrap()
    }

    fn front(&mut self, key: &str) -> Option<String> {
        self.store.read_string(&format!("{}/{key}", self.disk.frontend)).unwrap()
    }

    fn number(&mut self, key: &str) -> Option<u32> {
        self.front(key).map(|v| v.parse().unwrap())
    }

    fn set_state(&mut self, state: u32) {
        self.state = state;
        self.put("state", state);
    }

    /// Serves until the disk is unplugged or removed. Where the state is Connected already, takes
    /// over from a predecessor that died.
    pub(crate) fn serve(mut self, hypervisor: &dyn Hypervisor) {
        let (frontend, backend) = (self.disk.frontend.clone(), self.disk.backend.clone());
        self.store.watch(&format!("{frontend}/state"), "front").unwrap();
        self.store.watch(&format!("{backend}/online"), "online").unwrap();
        if self.own("state").as_deref() == Some("4") {
            self.state = 4;
            self.connect(hypervisor);
        } else {
            self.announce();
        }
        loop {
            while self.store.poll_event().unwrap().is_some() {}
            if !self.follow(hypervisor) {
                return;
            }
            for i in 0..self.queues.len() {
                while self.serve_queue(i) {}
            }
            self.wait();
        }
    }

    fn announce(&mut self) {
        for (key, value) in [
            ("multi-queue-max-queues", 4),
            ("max-ring-page-order", 4),
            ("feature-max-indirect-segments", MAX_SEGMENTS),
            ("feature-flush-cache", 1),
            ("sectors", DISK_BYTES / 512),
            ("sector-size", 512),
        ] {
            self.put(key, value);
        }
        self.set_state(2);
    }

    /// Reacts to the other side's state; `false` if the disk is gone.
    fn follow(&mut self, hypervisor: &dyn Hypervisor) -> bool {
        let front = self.number("state").unwrap_or(6);
        match (front, self.state) {
            (3 | 4, 2) => {
                self.connect(hypervisor);
                self.set_state(4);
            }
            (5, 4) => self.set_state(5),
            (6, 2 | 4 | 5) => {
                self.queues.clear();
                self.set_state(6);
            }
            (1, 4 | 6) => {
                self.queues.clear();
                self.announce();
            }
            _ => {}
        }
        !(front == 6 && self.own("online").as_deref() != Some("1"))
    }

    fn connect(&mut self, hypervisor: &dyn Hypervisor) {
        self.protocol = Protocol::from_key(self.front("protocol").as_deref()).unwrap();
        let count = self.number("multi-queue-num-queues").unwrap_or(1);
        let order = self.number("ring-page-order");
        let pages = match (order, self.number("num-ring-pages")) {
            (Some(order), _) => 1 << order,
            (None, pages) => pages.unwrap_or(1),
        };
        for i in 0..count {
            let dir = if count > 1 { format!("queue-{i}/") } else { String::new() };
            let port = self.number(&format!("{dir}event-channel")).unwrap();
            let refs: Vec<GrantRef> = (0..pages)
                .map(|page| {
                    let single =
                        if pages == 1 { self.number(&format!("{dir}ring-ref")) } else { None };
                    let numbered = |s: &mut Self| s.number(&format!("{dir}ring-ref{page}"));
                    GrantRef(single.or_else(|| numbered(self)).unwrap())
                })
                .collect();
            let link = hypervisor.connect(self.disk.domid, &refs, port, &Moving::copy()).unwrap();
            self.queues.push(BackRing::attach(link, self.protocol).unwrap());
        }
    }

    fn wait(&mut self) {
        let mut fds = vec![PollFd::from_borrowed_fd(self.store.fd(), PollFlags::IN)];
        let mut borrowed = Vec::new();
        for queue in &mut self.queues {
            if queue.final_check().unwrap() {
                return;
            }
            let link = queue.link();
            link.rearm().unwrap();
            borrowed.push(link.event_fd().as_fd().try_clone_to_owned().unwrap());
        }
        fds.extend(borrowed.iter().map(|fd| PollFd::new(fd, PollFlags::IN)));
        let timeout = Timespec { tv_sec: 0, tv_nsec: 20_000_000 };
        rustix::event::poll(&mut fds, Some(&timeout)).unwrap();
    }

    fn serve_queue(&mut self, i: usize) -> bool {
        self.queues[i].link().take_event().unwrap();
        if self.queues[i].unconsumed().unwrap() == 0 {
            return false;
        }
        let request = Request::decode(self.protocol, &self.queues[i].peek());
        self.queues[i].consume();
        let status = self.carry_out(i, &request.message);
        let response = Response { id: request.id, operation: request.response_op, status };
        self.queues[i].respond(response);
        if self.queues[i].publish() {
            self.queues[i].link().notify().unwrap();
        }
        true
    }

    fn carry_out(&mut self, i: usize, message: &Message) -> i16 {
        match message {
            Message::Plain { op: PlainOp::Flush, .. } => STATUS_OKAY,
            Message::Plain { op, nr_segments, sector, segments } => {
                let segments = &segments[..usize::from(*nr_segments)];
                self.transfer(i, *op == PlainOp::Read, *sector, segments)
            }
            Message::Indirect { op, nr_segments, sector, pages } => {
                match self.descriptors(i, usize::from(*nr_segments), pages) {
                    Some(all) => self.transfer(i, *op == IndirectOp::Read, *sector, &all),
                    None => STATUS_ERROR,
                }
            }
            _ => STATUS_NOT_SUPPORTED,
        }
    }

    fn descriptors(
        &mut self,
        i: usize,
        count: usize,
        pages: &[GrantRef],
    ) -> Option<Vec<RawSegment>> {
        let room = self.arena.span(DISK_BYTES, count * SEGMENT_BYTES);
        let per_page = SEGMENTS_PER_INDIRECT_PAGE * SEGMENT_BYTES;
        let piece = |(page, gref): (usize, &GrantRef)| {
            let at = page * per_page;
            let len = (room.len().saturating_sub(at)).min(per_page);
            (len > 0).then(|| CopySegment::new(room.slice(at, len), *gref, 0))
        };
        let mut copies: Vec<_> = pages.iter().enumerate().filter_map(piece).collect();
        self.queues[i].link().copy(&self.arena, Direction::FromGuest, &mut copies).ok()?;
        copies.iter().all(CopySegment::is_ok).then(|| {
            let mut bytes = vec![0; room.len()];
            self.arena.copy_out(room, &mut bytes);
            bytes
                .chunks_exact(SEGMENT_BYTES)
                .map(|b| RawSegment::decode(b.try_into().unwrap()))
                .collect()
        })
    }

    fn transfer(&mut self, i: usize, is_read: bool, sector: u64, segments: &[RawSegment]) -> i16 {
        let mut at = sector as usize * 512;
        let copies: Option<Vec<_>> = segments
            .iter()
            .map(|s| {
                let len = usize::from(s.last_sect + 1 - s.first_sect) * 512;
                let local: Option<Span> =
                    (at + len <= DISK_BYTES).then(|| self.arena.span(at, len));
                at += len;
                let offset = u16::from(s.first_sect) * 512;
                local.map(|local| CopySegment::new(local, GrantRef(s.gref), offset))
            })
            .collect();
        let Some(mut copies) = copies else { return STATUS_ERROR };
        let direction = if is_read { Direction::ToGuest } else { Direction::FromGuest };
        let outcome = self.queues[i].link().copy(&self.arena, direction, &mut copies);
        if !is_read && self.stall_at == Some(sector) {
            // The test that runs this process kills it now.
            println!("stalled");
            loop {
                std::thread::park();
            }
        }
        match outcome {
            Ok(()) if copies.iter().all(CopySegment::is_ok) => STATUS_OKAY,
            _ => STATUS_ERROR,
        }
    }
}
