//! The store of a story: its sizes, which are small, and its file or device.

use std::fs::File;
use std::path::PathBuf;
use std::sync::Arc;

use ferrite_disk::{Disk, Format, ImageName, OpenOptions, Volume, open_store};
use ferrite_host::clock::{Random, SplitMix64};
use ferrite_store::check::{How, Outcome, check};
use ferrite_store::content::DomainKey;
use ferrite_store::journal::Name;
use ferrite_store::layout::Layout;
use ferrite_store::live::{LEAST_METADATA, Live, Memory, Operation};
use ferrite_store::medium::Medium as Blocks;
use ferrite_store::opening;
use ferrite_store::owned::StoreHandle;
use ferrite_store::page::Packing;

use crate::devices::Devices;
use crate::format::Place;
use crate::images::Medium;
use crate::machine::Machine;

/// Domains of each story. All have equal contents.
pub(super) const DOMAINS: u16 = 2;

const BLOCK: u64 = 4096;

/// The seed's choices for a store.
#[derive(Clone)]
pub(super) struct StoreMedium {
    on: Medium,
    layout: Layout,
    memory: Memory,
    devices: Devices,
}

fn text(e: impl std::fmt::Display) -> String {
    e.to_string()
}

impl StoreMedium {
    /// Chooses small sizes: the journal wraps, and tables do not fit into their memory.
    pub(super) fn choose(on: Medium, random: &mut SplitMix64) -> StoreMedium {
        let mut of = |all: &[u64]| all[random.below(all.len() as u64) as usize];
        let journal_blocks = of(&[16, 16, 24, 72]);
        let layout = Layout::new(4608, journal_blocks, 64, 64);
        let metadata = LEAST_METADATA + of(&[0, 0, 64 << 10, 1 << 20]) as usize;
        let memory = Memory { metadata, index: of(&[0, 1 << 10, 1 << 20, 1 << 20]) as usize };
        StoreMedium { on, layout, memory, devices: Devices::choose(random) }
    }

    fn path(&self, place: &Place) -> PathBuf {
        place.image("pool.store")
    }

    fn bytes(&self) -> u64 {
        self.layout.blocks * BLOCK
    }

    /// Makes the store with its domains, durably.
    pub(super) fn create(&self, machine: &Machine) -> Result<(), String> {
        let path = self.path(&machine.place);
        match self.on {
            Medium::Files => File::create_new(&path).and_then(|f| f.set_len(self.bytes())),
            Medium::Devices => self.devices.provide(&machine.place, &path, self.bytes()),
        }
        .map_err(text)?;
        let (layout, memory, seed) = (self.layout, self.memory, machine.place.seed);
        let packing = [None, Some(Packing::Lz4), Some(Packing::Zstandard)][seed as usize % 3];
        let mut thread = machine.queues(1, &self.files(machine)?).map_err(text)?.remove(0);
        let port = thread.queue.port.clone();
        let made = async move {
            let mut id = [0; 16];
            id[..8].copy_from_slice(&seed.to_le_bytes());
            opening::create(&Blocks::default(), &port, &layout, id).await?;
            let live = Live::open(&port, layout.blocks * BLOCK, memory).await?;
            for domain in 0..DOMAINS {
                let name = Name::new(&format!("d{domain}")).ok_or(std::io::ErrorKind::Other)?;
                let key = DomainKey([seed as u8 ^ domain as u8; 32]);
                live.operate(&port, Operation::Domain(name, key)).await?;
            }
            live.set_packing(&port, packing).await?;
            live.close(&port).await
        };
        match machine.run(&mut thread, made)? {
            Some(Ok(())) => Ok(()),
            other => Err(format!("the store is not made: {other:?}")),
        }
    }

    /// The open file, without a disk.
    fn files(&self, machine: &Machine) -> Result<Vec<Arc<std::os::fd::OwnedFd>>, String> {
        let file = File::options().read(true).write(true).open(self.path(&machine.place));
        Ok(vec![Arc::new(file.map_err(text)?.into())])
    }

    fn options(&self, read_only: bool) -> OpenOptions {
        OpenOptions {
            read_only,
            fixed_size: self.on == Medium::Devices,
            metadata_bytes: self.memory.metadata,
            index_bytes: self.memory.index,
            ..OpenOptions::default()
        }
    }

    /// The store, opened by this process or already open.
    pub(super) fn handle(&self, machine: &Machine) -> Result<StoreHandle, String> {
        let engine = |arena| Ok(machine.world.engine(arena));
        StoreHandle::open_on(&self.path(&machine.place), &self.options(false), open_store, &engine)
            .map_err(text)
    }

    /// A volume of an open store.
    pub(super) fn volume(
        &self,
        place: &Place,
        name: &str,
        read_only: bool,
    ) -> Result<Disk, String> {
        let path = format!("{}#{name}", self.path(place).display()).into();
        let name = ImageName { format: Format::Store, path };
        let engine = |arena| Ok(place.world.engine(arena));
        Volume::open_on(&name, &self.options(read_only), &engine).map(Disk::Store).map_err(text)
    }

    /// The result of its own check, of everything on the medium.
    pub(super) fn check(&self, machine: &Machine) -> Result<Outcome, String> {
        let mut thread = machine.queues(1, &self.files(machine)?).map_err(text)?.remove(0);
        let (port, bytes) = (thread.queue.port.clone(), self.bytes());
        let how = How { contents: true, deep: true, ..How::default() };
        let checked = async move { check(&port, bytes, how, &|_, _| true).await };
        match machine.run(&mut thread, checked)? {
            Some(Ok(outcome)) => Ok(outcome),
            other => Err(format!("its check ends badly: {other:?}")),
        }
    }
}
