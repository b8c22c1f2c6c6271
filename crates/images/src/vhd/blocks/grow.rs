//! Space for new blocks: set aside ahead of its use, in steps that grow with the image, so that a
//! write to a new block costs what a write to an old one does.

use std::io;
use std::sync::atomic::Ordering;

use ferrite_disk_base::{Port, Rare, Raw};

use super::entry::State as Where;
use super::{Blocks, Part, State};
use crate::vhd::footers::last_sector;
use crate::vhd::format::SECTOR;
use crate::vhd::pieces::write_bytes;

/// The smallest and the largest step in bytes.
const MIN_STEP_BYTES: u64 = 16 << 20;
const MAX_STEP_BYTES: u64 = 512 << 20;

impl Blocks {
    /// Makes [`reserve`](Blocks::reserve) answer for the range.
    pub(in crate::vhd) async fn prepare(
        &self,
        port: &Port,
        raw: &Raw,
        offset: u64,
        len: u64,
    ) -> io::Result<()> {
        self.load(port, port.files[0], offset, len).await?;
        if self.tight.load(Ordering::Relaxed) {
            self.commit(port).await?;
        }
        let new = |part: &Part| self.entry(part.block).state() == Where::Empty;
        let wanted = self.parts(offset, len).filter(new).count();
        self.refill(port, raw, wanted).await
    }

    /// Below this much space another step is taken.
    pub(super) fn low_water(&self, state: &State) -> u64 {
        self.step(state) / 2
    }

    fn step(&self, state: &State) -> u64 {
        let two_blocks = (self.layout.stride() + 4096) * 2;
        let step = (state.next / 8).clamp(MIN_STEP_BYTES, MAX_STEP_BYTES).max(two_blocks);
        step.next_multiple_of(1 << 20)
    }

    /// Where the last of so many more blocks would end; `None`: the table cannot say that.
    fn end_of(&self, state: &State, wanted: usize) -> Option<u64> {
        (0..wanted).try_fold(state.next, |next, _| {
            let sector = self.layout.aligned_place(next)?;
            Some(u64::from(sector) * SECTOR + self.layout.stride())
        })
    }

    /// Has space for `wanted` more blocks, or says why there is none.
    pub(super) async fn refill(&self, port: &Port, raw: &Raw, wanted: usize) -> io::Result<()> {
        let full = || io::Error::from(io::ErrorKind::StorageFull);
        let enough = |state: &State| {
            let low = state.refilling && state.run_end - state.next < self.low_water(state);
            let end = self.end_of(state, wanted).ok_or_else(full)?;
            Ok::<bool, io::Error>(end <= state.run_end && !low)
        };
        if enough(&self.lock())? {
            return Ok(());
        }
        let _held = self.growing.lock(&port.io).await?;
        if enough(&self.lock())? {
            return Ok(());
        }
        match self.is_file {
            true => self.grow_file(port, wanted).await,
            false => self.grow_device(port, raw, wanted).await,
        }
    }

    /// Before the footer at the end goes, or what it refers to changes, the copy at the beginning is
    /// made whole: it may be damaged, or older.
    pub(in crate::vhd) async fn mend_copy(&self, port: &Port) -> io::Result<()> {
        if !self.copy_whole.load(Ordering::Acquire) {
            write_bytes(port, port.files[0], &[(0, &self.footer)]).await?;
            self.sync(port).await?;
            self.copy_whole.store(true, Ordering::Release);
        }
        Ok(())
    }

    /// Makes the file longer. Its last sector is never given to a block, so that a guest cannot
    /// write what would look like a footer to whoever opens the image after a crash: zeros are
    /// durable there before the file is cut off behind them.
    async fn grow_file(&self, port: &Port, wanted: usize) -> io::Result<()> {
        let (from, cut, least, step) = {
            let state = self.lock();
            let end = self.end_of(&state, wanted).unwrap_or(state.next);
            let least = end.saturating_sub(state.run_end) + SECTOR;
            (state.run_end, state.cut, least, self.step(&state).max(least))
        };
        if !cut {
            // The footer goes with it: until `close` writes it again, the copy at 0 serves. The
            // table on disk names nothing behind this point, so nothing can be lost.
            self.mend_copy(port).await?;
            write_bytes(port, port.files[0], &[(from, &[0; SECTOR as usize])]).await?;
            self.sync(port).await?;
            port.io.set_len(port.files[0], from + SECTOR).await?;
            self.lock().cut = true;
        }
        let mut got = allocate(port, from, step).await.map(|()| step);
        if matches!(&got, Err(e) if e.kind() == io::ErrorKind::StorageFull) && least < step {
            got = allocate(port, from, least).await.map(|()| least);
        }
        let mut state = self.lock();
        state.refilling = false;
        state.changed = true;
        match got {
            Ok(got) => state.run_end = from + got - SECTOR,
            // What was wanted may be there all the same: then this was only ahead of its use.
            Err(e) if wanted > 0 && least > SECTOR => return Err(e),
            Err(_) => {}
        }
        Ok(())
    }

    /// The footer of a device is durable in its new last sector: zeros, durable, come to where it was.
    pub(in crate::vhd) async fn forget_footer(&self, port: &Port, last: u64) -> io::Result<()> {
        let old = self.last_sector.load(Ordering::Acquire);
        write_bytes(port, port.files[0], &[(old, &[0; SECTOR as usize])]).await?;
        self.sync(port).await?;
        self.last_sector.store(last, Ordering::Release);
        Ok(())
    }

    /// All of a device is there from the beginning; but it may have been made larger. Its last
    /// sector is the footer's:
    ///
    /// 1. The footer at the new end; `fdatasync`.
    /// 2. Zeros where it was; `fdatasync`. A block that comes to lie there has what nobody wrote.
    /// 3. Blocks may take its place.
    async fn grow_device(&self, port: &Port, raw: &Raw, wanted: usize) -> io::Result<()> {
        let last = last_sector(raw)?;
        if last > self.last_sector.load(Ordering::Acquire) {
            write_bytes(port, port.files[0], &[(last, &self.footer)]).await?;
            self.sync(port).await?;
            self.forget_footer(port, last).await?;
            Rare::DeviceGrown.taken();
        }
        let mut state = self.lock();
        state.refilling = false;
        state.run_end = state.run_end.max(last);
        match self.end_of(&state, wanted) {
            Some(end) if end <= state.run_end => Ok(()),
            _ => Err(io::ErrorKind::StorageFull.into()),
        }
    }
}

/// `fallocate`, or where the file system has none, just a longer file.
async fn allocate(port: &Port, from: u64, len: u64) -> io::Result<()> {
    match port.io.allocate(port.files[0], from, len).await {
        Err(e) if e.kind() == io::ErrorKind::Unsupported => {
            port.io.set_len(port.files[0], from + len).await
        }
        done => done,
    }
}
