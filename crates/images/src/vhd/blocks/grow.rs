//! Space for new blocks: set aside ahead of its use, in steps that grow with the image. So a write to a new block costs
//! the same as one to an old block.

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
    /// Enables [`reserve`](Blocks::reserve) to answer for the range.
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

    /// If less space than this is left, the next step is taken.
    pub(super) fn low_water(&self, state: &State) -> u64 {
        self.step(state) / 2
    }

    fn step(&self, state: &State) -> u64 {
        let two_blocks = (self.layout.stride() + 4096) * 2;
        let step = (state.next / 8).clamp(MIN_STEP_BYTES, MAX_STEP_BYTES).max(two_blocks);
        step.next_multiple_of(1 << 20)
    }

    /// The end of so many more blocks; `None`: the table cannot express that.
    fn end_of(&self, state: &State, wanted: usize) -> Option<u64> {
        (0..wanted).try_fold(state.next, |next, _| {
            let sector = self.layout.aligned_place(next)?;
            Some(u64::from(sector) * SECTOR + self.layout.stride())
        })
    }

    /// Makes space for `wanted` more blocks, or tells why there is none.
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
            true => self.grow_file(port, raw, wanted).await,
            false => self.grow_device(port, raw, wanted).await,
        }
    }

    /// Repairs the copy of the footer at the beginning, before the footer at the end is removed, or data that it refers
    /// to change: the copy may be damaged, or older.
    pub(in crate::vhd) async fn mend_copy(&self, port: &Port) -> io::Result<()> {
        if !self.copy_whole.load(Ordering::Acquire) {
            write_bytes(port, port.files[0], &[(0, &self.footer())]).await?;
            self.sync(port).await?;
            self.copy_whole.store(true, Ordering::Release);
        }
        Ok(())
    }

    /// Makes the file longer. Its last sector is never given to a block. Otherwise a guest could write a fake footer
    /// there, which would be read after a crash. Zeros are durable there before the file is cut off after them.
    async fn grow_file(&self, port: &Port, raw: &Raw, wanted: usize) -> io::Result<()> {
        let (from, cut, least, step) = {
            let state = self.lock();
            let end = self.end_of(&state, wanted).unwrap_or(state.next);
            let least = end.saturating_sub(state.run_end) + SECTOR;
            (state.run_end, state.cut, least, self.step(&state).max(least))
        };
        if !cut {
            // This overwrites the footer: until `close` writes it again, the copy at 0 serves. The
            // table on disk names nothing past this point, so nothing can be lost.
            self.mend_copy(port).await?;
            write_bytes(port, port.files[0], &[(from, &[0; SECTOR as usize])]).await?;
            self.sync(port).await?;
            port.io.set_len(port.files[0], from + SECTOR).await?;
            self.lock().cut = true;
        }
        let mut got = allocate(port, raw, from, step).await.map(|()| step);
        if matches!(&got, Err(e) if e.kind() == io::ErrorKind::StorageFull) && least < step {
            got = allocate(port, raw, from, least).await.map(|()| least);
        }
        let mut state = self.lock();
        state.refilling = false;
        state.changed = true;
        match got {
            Ok(got) => state.run_end = from + got - SECTOR,
            // The wanted space may be there all the same: then this was only ahead of its use.
            Err(e) if wanted > 0 && least > SECTOR => return Err(e),
            Err(_) => {}
        }
        Ok(())
    }

    /// Overwrites the old footer of a device with zeros, durably. The footer is durable in the new last sector.
    pub(in crate::vhd) async fn forget_footer(&self, port: &Port, last: u64) -> io::Result<()> {
        let old = self.last_sector.load(Ordering::Acquire);
        write_bytes(port, port.files[0], &[(old, &[0; SECTOR as usize])]).await?;
        self.sync(port).await?;
        self.last_sector.store(last, Ordering::Release);
        Ok(())
    }

    /// Adapts to the present size of a device: it may have been made larger. Its last sector is the footer's:
    ///
    /// 1. The footer at the new end; `fdatasync`.
    /// 2. Zeros over the old footer; `fdatasync`. Otherwise a block that is placed there would have stale data.
    /// 3. Blocks may be placed there.
    async fn grow_device(&self, port: &Port, raw: &Raw, wanted: usize) -> io::Result<()> {
        let last = last_sector(raw)?;
        if last > self.last_sector.load(Ordering::Acquire) {
            write_bytes(port, port.files[0], &[(last, &self.footer())]).await?;
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

/// `fallocate`; or a longer file, if the file system lacks that, or space is not reserved.
async fn allocate(port: &Port, raw: &Raw, from: u64, len: u64) -> io::Result<()> {
    if !raw.reserves_space() {
        return port.io.set_len(port.files[0], from + len).await;
    }
    match port.io.allocate(port.files[0], from, len).await {
        Err(e) if e.kind() == io::ErrorKind::Unsupported => {
            port.io.set_len(port.files[0], from + len).await
        }
        done => done,
    }
}
