//! Copies of disks into volumes of a store.

use std::io;
use std::path::Path;

use ferrite_disk::Disk;
use ferrite_disk_base::{DiskError, ErrorKind, Format, ImageName, Port, SECTOR_BYTES};
use ferrite_images::children::PARTIAL;
use ferrite_images::open_store;
use ferrite_store::BLOCK_BYTES;
use ferrite_store::journal::Name;
use ferrite_store::live::{Live, Operation};
use ferrite_store::owned::StoreHandle;

use super::copy::{Copying, Mode};
use super::io_context::IoContext;
use super::salvage::Lost;
use super::stores::until_stopped;
use super::{Convert, Done, ImageTools, Progress, broken, refused};

/// The domain of volumes that are made without a given one.
const DOMAIN: u16 = 0;

impl ImageTools<'_> {
    /// Copies the content of `from` into a new volume. With `damaged` that is open already, and may be damaged. Until it is complete and durable the volume is called
    /// `NAME.partial`. Then a clone of it gets the name, and it is deleted.
    pub(super) fn convert_into(
        &self,
        from: &ImageName,
        (path, volume): (&Path, &str),
        how: &Convert,
        damaged: Option<(&Disk, &Lost)>,
    ) -> Result<Done, DiskError> {
        let to = format!("{}#{volume}", path.display());
        let what = || format!("cannot convert {} to {to}", from.path.display());
        let cannot = |e: io::Error| match e.kind() {
            io::ErrorKind::StorageFull => {
                let help = "delete what the store needs no more (ferrite store delete, then gc), or make room below it";
                DiskError::new(ErrorKind::Io, what(), e.to_string(), help)
            }
            _ => broken(what(), e),
        };
        if how.resume || how.fixed || how.unit_bytes.is_some() {
            let why = "a volume of a store is filled at once, takes space as it is written, and has \
                       blocks of 4 KiB";
            let help = "leave --resume, --fixed and --block out";
            return Err(DiskError::new(ErrorKind::Usage, what(), why, help));
        }
        let partial = format!("{volume}{PARTIAL}");
        let names = Name::new(volume).zip(Name::new(&partial));
        let (name, partial_name) = names.ok_or_else(|| {
            let why = format!("{volume} is no name that a volume can have while it is filled");
            let help = "use 1 to 55 letters, digits, \"-\", \"_\" or \".\"; begin with a letter or digit. \
                        \".partial\" is added to it until the copy is complete";
            DiskError::new(ErrorKind::Usage, what(), why, help)
        })?;
        let opened;
        let source = match damaged {
            Some((source, _)) => source,
            None => {
                opened = self.open(from, true)?;
                &opened
            }
        };
        let bytes = source.sectors() * SECTOR_BYTES;
        let options = self.medium_options(false);
        let handle = StoreHandle::open_on(path, &options, open_store, self.engine)?;
        let live = handle.store().live();
        if live.volume(volume).is_some() {
            let help = "choose another name, or delete the volume first (ferrite store delete); or write \
                        to the volume by NBD (ferrite export nbd)";
            return Err(refused(what(), format!("{to} is there"), help));
        }
        let mut context = Copying::context(self).map_err(cannot)?;
        let port = context.port_of(handle.store().files()).map_err(cannot)?;
        if let Some(left) = live.volume(&partial) {
            if !how.force || handle.store().is_used(left) {
                let why = format!("{to}{PARTIAL} is there, of a conversion that was interrupted");
                return Err(refused(what(), why, "start again with --force"));
            }
            operate(&mut context, live, &port, Operation::Delete(left)).map_err(cannot)?;
        }
        let blocks = bytes.div_ceil(BLOCK_BYTES as u64);
        // Equal content is found from the first block on: no background work loads the index here.
        let goes_on = || (self.progress)(Progress { done_bytes: 0, total_bytes: bytes });
        context.run(until_stopped(&goes_on, live.load_whole_index(&port))).map_err(cannot)?;
        let create = Operation::Create(partial_name, blocks, DOMAIN);
        let made = operate(&mut context, live, &port, create).map_err(cannot)?;
        let mut target = path.as_os_str().to_owned();
        target.push(format!("#{partial}"));
        let target = ImageName { format: Format::Store, path: target.into() };
        let target = Disk::open_image(&target, &options)?;
        let copying = Copying::new(self, &mut context, Mode::Fill, source, &target);
        let mut copying = copying.map_err(cannot)?;
        if let Some((_, lost)) = damaged {
            copying.tolerate(lost);
        }
        copying.skip_zeros_of(how.zero_bytes);
        let copied = context.run(copying.run());
        drop(copying);
        drop(target);
        // An unfinished copy takes no space. If it cannot be deleted, --force does it.
        let named = copied.and_then(|()| {
            operate(&mut context, live, &port, Operation::Clone(name, made)).map(drop)
        });
        let deleted = operate(&mut context, live, &port, Operation::Delete(made)).map(drop);
        named.and(deleted).map_err(cannot)?;
        context.run(live.close(&port)).map_err(cannot)?;
        let format = Format::Store.name();
        Ok(Done { path: to, format, virtual_bytes: blocks * BLOCK_BYTES as u64, notes: Vec::new() })
    }
}

fn operate(
    context: &mut IoContext,
    live: &Live,
    port: &Port,
    operation: Operation,
) -> io::Result<u32> {
    context.run(live.operate(port, operation))
}
