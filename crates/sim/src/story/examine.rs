//! The check of an image at the end of a round.

use std::ops::Range;
use std::rc::Rc;

use ferrite_host::clock::Random;

use super::Story;
use crate::format::{Disk, Format};
use crate::load::MAX_REQUEST_SECTORS;
use crate::machine::Thread;
use crate::model::After;
use crate::stamp;

impl<F: Format> Story<'_, F> {
    /// Checks the image, opens it, compares all sectors that were ever changed, and at times the rest.
    pub(super) fn examine(&mut self, after: After, sizes: &[u64]) -> Result<(), String> {
        self.look(after, sizes, true)
    }

    /// Examines the image. `observe`: the contents that are found are the present ones from now on.
    pub(super) fn look(
        &mut self,
        after: After,
        sizes: &[u64],
        observe: bool,
    ) -> Result<(), String> {
        let thorough = self.random.below(16) == 0;
        let place = &self.machine.place;
        // After a death, too: the power may be cut before the memory is examined.
        self.format.check(place, thorough).map_err(|e| format!("its check says: {e}"))?;
        let disk = Rc::new(self.format.open(place).map_err(|e| format!("after {after:?}: {e}"))?);
        let sectors = disk.sectors();
        if !sizes.contains(&sectors) {
            return Err(format!("after {after:?} it has {sectors} sectors, and not {sizes:?}"));
        }
        self.model.borrow_mut().grow(sectors);
        let mut threads = self.machine.queues(1, &disk.files()).map_err(|e| e.to_string())?;
        for range in self.ranges(sectors) {
            self.compare(after, &disk, &mut threads[0], range, observe)?;
        }
        Ok(())
    }

    /// The ranges to read, in pieces.
    pub(super) fn ranges(&mut self, sectors: u64) -> Vec<Range<u64>> {
        let all = self.random.below(8) == 0;
        let piece = MAX_REQUEST_SECTORS;
        let model = self.model.borrow();
        let mut pieces: Vec<u64> = match all {
            true => (0..sectors.div_ceil(piece)).collect(),
            false => model.touched().map(|s| s / piece).collect(),
        };
        pieces.push(self.random.below(sectors) / piece);
        let edges = self.edges.iter().flat_map(|at| [at.saturating_sub(1), *at, at + piece]);
        pieces.extend(edges.filter(|at| *at < sectors).map(|at| at / piece));
        pieces.sort_unstable();
        pieces.dedup();
        pieces.iter().map(|p| p * piece..((p + 1) * piece).min(sectors)).collect()
    }

    pub(super) fn compare(
        &mut self,
        after: After,
        disk: &Rc<F::Disk>,
        thread: &mut Thread,
        range: Range<u64>,
        observe: bool,
    ) -> Result<(), String> {
        let len = (range.end - range.start) as usize * stamp::SECTOR;
        let (to, offset) = (thread.buffer(0).slice(0, len), range.start * 512);
        let (at, queue) = (disk.clone(), thread.queue.clone());
        let read = async move { at.read(&queue, offset, to).await };
        let read = self.machine.run(thread, read)?;
        match read {
            Some(Ok(())) => {}
            other => return Err(format!("after {after:?} {range:?} cannot be read: {other:?}")),
        }
        let mut bytes = vec![0; len];
        thread.queue.memory().copy_out(to, &mut bytes);
        let mut model = self.model.borrow_mut();
        for (sector, bytes) in range.zip(bytes.chunks_exact(stamp::SECTOR)) {
            let found = stamp::read(bytes, self.plan.seed, sector);
            if self.plan.trace == Some(sector) {
                println!("step {}: after {after:?}: {found:?}", self.ended_at);
            }
            model.check_after(after, sector, &found)?;
            if let (Ok(value), true) = (found, observe) {
                model.observe(after, sector, value);
            }
        }
        Ok(())
    }
}
