//! A cluster that was taken, and that nothing refers to yet.

use std::cell::Cell;
use std::io;

use ferrite_disk_base::Port;

use crate::qcow2::alloc::Allocator;
use crate::qcow2::tables::meta::{TRIES, out_of_memory};

/// A fresh cluster. If it is dropped, also with its task, it is free again.
pub(in crate::qcow2) struct Fresh<'a> {
    alloc: &'a Allocator,
    cluster: u64,
    /// Its space reads as zeros.
    pub(in crate::qcow2) zeroed: bool,
    fate: Cell<Fate>,
}

/// The fate of a fresh cluster when it is dropped.
#[derive(Clone, Copy)]
pub(in crate::qcow2) enum Fate {
    /// An entry refers to it.
    Referred,
    /// It can be used again: no write to it has failed, and none is in flight.
    Good,
    /// Neither is known.
    Unknown,
}

impl Fresh<'_> {
    pub(in crate::qcow2) fn offset(&self) -> u64 {
        self.cluster << self.alloc.cluster_bits
    }

    pub(in crate::qcow2) fn becomes(&self, fate: Fate) {
        self.fate.set(fate);
    }

    /// Notes that something refers to it, or that it is used without a reference; returns its number.
    pub(in crate::qcow2) fn refer(self) -> u64 {
        self.becomes(Fate::Referred);
        self.cluster
    }

    /// The result of a step that does not write to it, and after whose failure the task ends.
    pub(in crate::qcow2) fn is_good_without<T>(&self, done: io::Result<T>) -> io::Result<T> {
        done.inspect_err(|_| self.becomes(Fate::Good))
    }
}

impl Drop for Fresh<'_> {
    fn drop(&mut self) {
        match self.fate.get() {
            Fate::Referred => {}
            Fate::Good => self.alloc.base.state().clusters.give_back(self.cluster),
            Fate::Unknown => self.alloc.base.state().clusters.untake(self.cluster),
        }
    }
}

impl Allocator {
    /// Takes a fresh cluster, however long the search takes.
    pub(in crate::qcow2) async fn take(&self, port: &Port) -> io::Result<Fresh<'_>> {
        for _ in 0..TRIES {
            if let Some((cluster, zeroed)) = self.base.state().clusters.take() {
                return Ok(Fresh { alloc: self, cluster, zeroed, fate: Cell::new(Fate::Unknown) });
            }
            self.set_aside(port).await?;
        }
        Err(out_of_memory())
    }

    /// Takes adjacent fresh clusters, with counts of one; the byte offset of the first.
    pub(in crate::qcow2) async fn take_neighbours(
        &self,
        port: &Port,
        count: u64,
    ) -> io::Result<u64> {
        const TRIES: u64 = 1 << 16;
        self.only_behind_the_end(port).await?;
        let mut first = None;
        let mut got = 0;
        for _ in 0..TRIES.max(count * 4) {
            let taken = self.base.state().clusters.take();
            let Some((cluster, _)) = taken else {
                self.set_aside(port).await?;
                continue;
            };
            match first {
                Some(first) if first + got == cluster => got += 1,
                other => {
                    // A refcount block is in between: the clusters taken so far are free again.
                    let clusters = &mut self.base.state().clusters;
                    (0..got).for_each(|i| {
                        if let Some(first) = other {
                            clusters.untake(first + i);
                        }
                    });
                    (first, got) = (Some(cluster), 1);
                }
            }
            if let Some(first) = first.filter(|_| got == count) {
                return Ok(first << self.cluster_bits);
            }
        }
        Err(io::Error::new(io::ErrorKind::StorageFull, "no room for a longer L1 table"))
    }
}
