//! A guest that changes its state and its rings at a high rate (threats.md T4).

use ferrite_host::clock::{Random, SplitMix64};
use ferrite_loopback::front::{Buffer, FrontOptions, Frontend};
use ferrite_xen::abi::{PlainOp, Protocol};

use crate::PATIENCE;

/// A guest that acts at random.
pub struct Restless {
    /// Its disk.
    pub front: Frontend,
    buffer: Buffer,
    random: SplitMix64,
    actions: u64,
}

impl Restless {
    /// A guest with a disk that is offered, or will be soon.
    pub fn new(mut front: Frontend, seed: u64) -> Restless {
        front.wait_for_backend(&[2], PATIENCE).unwrap();
        front.read_features().unwrap();
        let buffer = front.space().buffer(32).unwrap();
        Restless { front, buffer, random: SplitMix64::new(seed), actions: 0 }
    }

    /// The number of its actions so far.
    pub fn actions(&self) -> u64 {
        self.actions
    }

    /// A number from its own generator.
    pub fn below(&mut self, bound: u64) -> u64 {
        self.random.below(bound)
    }

    /// Random options of a connection.
    pub fn shape(&mut self) -> FrontOptions {
        let protocol = [Protocol::X86_64, Protocol::X86_32][self.below(2) as usize];
        let (order, queues) = (self.below(3) as u32, 1 + self.below(4) as u32);
        FrontOptions { protocol, order, queues, check_release: false, ..FrontOptions::default() }
    }

    /// Acts at random. Each action may fail, as the toolstack may have removed the directory.
    pub fn act(&mut self) {
        self.actions += 1;
        match self.below(24) {
            0 => drop(self.front.remove_key("state")),
            1 => self.offer(),
            2..=4 => self.fill_rings(),
            _ => {
                let state = [1, 3, 4, 5, 6][self.below(5) as usize];
                let _ = self.front.set_state(state);
            }
        }
    }

    /// Offers other rings, without closing the old ones, whose memory is reused or not.
    fn offer(&mut self) {
        if self.below(2) == 0 {
            self.front.queues.clear();
        }
        let shape = self.shape();
        let _ = self.front.offer(&shape);
        self.fill_rings();
    }

    fn fill_rings(&mut self) {
        let (random, buffer) = (&mut self.random, &self.buffer);
        for queue in &mut self.front.queues {
            while let Ok(Some(_)) = queue.take() {}
            while queue.free_slots() > 0 {
                let most = if random.below(10) == 0 { 20 } else { 3 };
                let (sector, pages) = (random.below(1000), 1 + random.below(most) as usize);
                let asked = match random.below(40) {
                    0 => queue.flush(),
                    1 => queue.plain(PlainOp::Barrier, sector, &[buffer.segment(0, 0, 7)]),
                    2 => queue.discard(sector, 64, false),
                    n if n % 2 == 0 => queue.read(sector, buffer, 0, pages * 4096),
                    _ => queue.write(sector, buffer, 0, pages * 4096),
                };
                if asked.is_err() {
                    break;
                }
            }
            let _ = queue.push();
        }
    }

    /// Writes and reads one page, on each queue.
    pub fn works(&mut self) {
        for (i, queue) in self.front.queues.iter_mut().enumerate() {
            let byte = self.random.next_u64() as u8;
            self.buffer.fill(0, 4096, byte);
            queue.write(8, &self.buffer, 0, 4096).unwrap();
            assert!(queue.next_reply(PATIENCE).unwrap().is_ok(), "queue {i}");
            self.buffer.fill(0, 4096, !byte);
            queue.read(8, &self.buffer, 0, 4096).unwrap();
            assert!(queue.next_reply(PATIENCE).unwrap().is_ok(), "queue {i}");
            assert!(self.buffer.to_vec(0, 4096) == vec![byte; 4096], "queue {i}");
        }
    }

    /// Behaves correctly: closes everything, connects, uses the disk, and closes it. Only both steps of closing prove
    /// that the old rings are released: the first state that it finds may be from before the backend's last reading.
    pub fn reconnect(&mut self) {
        self.front.set_state(5).unwrap();
        self.front.wait_for_backend(&[5, 6], PATIENCE).unwrap();
        self.front.set_state(6).unwrap();
        self.front.wait_for_backend(&[6], PATIENCE).unwrap();
        self.front.set_state(1).unwrap();
        self.front.wait_for_backend(&[2], PATIENCE).unwrap();
        self.front.queues.clear();
        let shape = self.shape();
        self.front.connect(&shape, PATIENCE).unwrap();
        self.works();
        assert_eq!(self.front.backend_state().unwrap(), 4);
        self.front.close(PATIENCE).unwrap();
        assert_eq!(self.front.backend_state().unwrap(), 6);
        let memory = self.front.space().memory();
        assert_eq!((memory.bound_ports(), memory.grants().users()), (0, 0));
    }
}
