//! The maps of a disk that is open for writing. The order of writes is in the text of [`dirty`](super).

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::io;
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use ferrite_host::clock::secret;
use ferrite_host::place::Place;
use ferrite_io::engine::FileId;

use super::fine::{self, Fine};
use super::found::{Found, cannot, changed_at, identity};
use super::layout::{
    BITS, Head, IDENTITY_AT, OTHER_AT, SECTOR, State, identity_to_bytes, parse_sector, place,
    regions, sector_to_bytes,
};
use super::view::KnownMap;
use super::{REGION_BYTES, path_of};
use crate::{Commits, DiskError, OpenOptions, Port, Raw};

mod clearing;

/// Most bytes that are marked by one commit: bounded work, however long a request is.
const STEP_BYTES: u64 = 1 << 30;

/// The maps of an open disk.
pub struct Tracker {
    file: Arc<OwnedFd>,
    path: PathBuf,
    /// The index of the file in the disk's files.
    index: usize,
    known: Vec<KnownMap>,
    /// The size of the disk when the file was made.
    bytes: u64,
    regions: u64,
    fine: Fine,
    /// One commit at a time marks regions, for all writes that wait.
    commits: Commits,
    book: Mutex<Book>,
    /// The maps were made void: changes are not recorded any more.
    is_off: AtomicBool,
}

/// The known state of the file.
struct Book {
    head: Head,
    /// Whether the head says durably that the image is open.
    is_open: bool,
    /// The image, as long as the file names another one, too.
    image: Option<String>,
    /// Regions whose bits are set in all maps: durably, as soon as `is_open`.
    marked: Vec<u64>,
    /// The maps' names, and the regions whose bits may be set in each.
    maps: Vec<(String, Vec<u64>)>,
    /// Regions that writes wait for. They stay until a commit has ended well: it may be dropped with its task.
    wanted: BTreeSet<u64>,
}

/// The writes of one commit.
struct Step {
    head: Option<Head>,
    /// The regions of each sector.
    sectors: BTreeMap<u64, Vec<u64>>,
}

impl fmt::Debug for Tracker {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Tracker").field("path", &self.path).finish_non_exhaustive()
    }
}

impl Tracker {
    /// The maps of the image in `raw`, which is open for writing; its disk has so many bytes, and the maps' file is
    /// number `index` of its files. `None`: it has no maps, or they do not fit and are void now.
    ///
    /// # Errors
    /// They cannot be opened, or not be made void. The image must not be written then.
    pub fn open(
        raw: &Raw,
        bytes: u64,
        options: &OpenOptions,
        index: usize,
    ) -> Result<Option<Tracker>, DiskError> {
        let Some(found) = Found::open(raw, bytes, true)? else { return Ok(None) };
        if let Some(why) = &found.void {
            found.make_void(why)?;
            return Ok(None);
        }
        let Found { file, path, content: Some(content), .. } = found else { return Ok(None) };
        if content.damaged > 0 {
            crate::warn_once(&format!(
                "{} sectors of the dirty maps {} are damaged: their regions count as changed",
                content.damaged,
                path.display()
            ));
        }
        let regions = regions(content.head.bytes);
        let words = 0..regions.div_ceil(64) as usize;
        let all = |i: usize| content.maps.iter().fold(u64::MAX, |all, map| all & map.bits[i]);
        let is_set = |map: usize, region: u64| {
            content.maps[map].bits[region as usize / 64] >> (region % 64) & 1 != 0
        };
        let fine = options.state_dir.as_deref().and_then(|dir| {
            let end = Place::of(raw.fd(), raw.path()).ok()?.journal_end();
            Some(fine::path(dir, &content.head.file, &end))
        });
        let fine = Fine::open(fine.as_deref(), &content.head, is_set);
        let fine = fine.map_err(|e| cannot("keep", &path, e))?;
        let own = identity(raw.fd(), raw.path()).map_err(|e| cannot("compare", &path, e))?;
        let book = Book {
            head: content.head.clone(),
            is_open: false,
            image: content.other.as_ref().map(|_| own),
            marked: words.map(all).collect(),
            maps: content.maps.iter().map(|map| (map.name.clone(), map.bits.clone())).collect(),
            wanted: BTreeSet::new(),
        };
        Ok(Some(Tracker {
            file: Arc::new(OwnedFd::from(file)),
            path,
            index,
            known: content.maps.iter().map(KnownMap::of).collect(),
            bytes: content.head.bytes,
            regions,
            fine,
            commits: Commits::new(),
            book: Mutex::new(book),
            is_off: AtomicBool::new(false),
        }))
    }

    /// The file of the maps, for an engine.
    pub fn file(&self) -> Arc<OwnedFd> {
        self.file.clone()
    }

    /// Whether a range may be written now: the hot path's question. It notes the blocks in memory then.
    ///
    /// # Panics
    /// If the range is empty.
    #[inline]
    pub fn is_marked(&self, offset: u64, len: u64) -> bool {
        self.fine.is_marked(offset, len) || self.is_off.load(Ordering::Acquire)
    }

    pub(super) fn known(&self) -> &[KnownMap] {
        &self.known
    }

    /// Looks at what has changed since the map of this index was begun: the size of the disk that it is for, and the
    /// blocks of each of its regions. Of maps that were given up, everything.
    pub(super) fn with_blocks<R>(
        &self,
        map: usize,
        look: impl FnOnce(u64, &dyn Fn(u64) -> u64) -> R,
    ) -> R {
        if self.is_off.load(Ordering::Acquire) {
            return look(self.bytes, &|_| u64::MAX);
        }
        if self.fine.has_words() {
            return look(self.bytes, &|region| self.fine.changed(map, region));
        }
        let book = self.book();
        let is_set = |region: u64| book.maps[map].1[region as usize / 64] >> (region % 64) & 1 != 0;
        look(self.bytes, &|region| if is_set(region) { u64::MAX } else { 0 })
    }

    fn book(&self) -> MutexGuard<'_, Book> {
        self.book.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Marks a range, durably, before it is changed. Concurrent callers share syncs.
    ///
    /// # Errors
    /// The file cannot be written, and not be made void. The range must not be changed.
    pub async fn mark(&self, port: &Port, offset: u64, len: u64) -> io::Result<()> {
        let (mut at, end) = (offset, offset + len);
        while at < end {
            let step = (end - at).min(STEP_BYTES);
            if !self.is_marked(at, step) {
                self.mark_step(port, at, step).await?;
            }
            at += step;
        }
        Ok(())
    }

    async fn mark_step(&self, port: &Port, offset: u64, len: u64) -> io::Result<()> {
        if self.want(offset, len) {
            let marked = self.commits.join(&port.io, self.commit(port)).await;
            if let Err(e) = marked {
                return self.give_up(port, e).await;
            }
        }
        self.fine.mark(offset, len);
        Ok(())
    }

    /// Asks for the regions of a range. `false`: all of them are durable.
    fn want(&self, offset: u64, len: u64) -> bool {
        let last = (offset + len).div_ceil(REGION_BYTES).min(self.regions);
        let mut book = self.book();
        let Book { is_open, marked, wanted, .. } = &mut *book;
        let lacks =
            |region: &u64| !*is_open || marked[*region as usize / 64] >> (region % 64) & 1 == 0;
        let mut waits = false;
        for region in (offset / REGION_BYTES..last).filter(lacks) {
            waits = true;
            wanted.insert(region);
        }
        waits
    }

    /// The writes of the next commit. `None`: nothing, as an earlier one did.
    fn next_step(&self) -> io::Result<Option<Step>> {
        let book = self.book();
        if book.wanted.is_empty() {
            return Ok(None);
        }
        let mut sectors = BTreeMap::<u64, Vec<u64>>::new();
        for region in &book.wanted {
            sectors.entry(region / BITS).or_default().push(*region);
        }
        let head = match book.is_open {
            true => None,
            false => {
                let opening = u64::from_le_bytes(secret::<8>()?);
                Some(Head { state: State::Open, opening, ..book.head.clone() })
            }
        };
        Ok(Some(Step { head, sectors }))
    }

    /// Makes the wanted regions durable.
    async fn commit(&self, port: &Port) -> io::Result<()> {
        let Some(Step { head, sectors }) = self.next_step()? else { return Ok(()) };
        let file = port.files[self.index];
        if let Some(head) = &head {
            self.write(port, file, 0, &head.to_bytes()).await?;
        }
        for (sector, regions) in &sectors {
            for map in 0..self.known.len() {
                self.set_bits(port, file, map, *sector, regions).await?;
            }
        }
        port.io.sync(file).await?;
        self.bind(port, file).await?;
        let mut book = self.book();
        if let Some(head) = head {
            self.fine.begin_opening(head.opening);
            book.head = head;
            book.is_open = true;
        }
        for region in sectors.into_values().flatten() {
            let (word, bit) = (region as usize / 64, 1 << (region % 64));
            book.marked[word] |= bit;
            book.maps.iter_mut().for_each(|(_, bits)| bits[word] |= bit);
            book.wanted.remove(&region);
        }
        Ok(())
    }

    /// Binds the file to this image alone, if another one was about to get its name. The head says "open", durably: so
    /// no time of a change counts. The first identity is durable before the second goes, and one of the two is always
    /// the image's.
    async fn bind(&self, port: &Port, file: FileId) -> io::Result<()> {
        let Some(image) = self.book().image.clone() else { return Ok(()) };
        let id = self.book().head.file;
        let own = identity_to_bytes(&id, &image, (0, 0));
        self.write(port, file, IDENTITY_AT as u64, &own).await?;
        port.io.sync(file).await?;
        self.write(port, file, OTHER_AT as u64, &[0; SECTOR]).await?;
        port.io.sync(file).await?;
        self.book().image = None;
        Ok(())
    }

    /// Sets the bits of these regions in one sector.
    async fn set_bits(
        &self,
        port: &Port,
        file: FileId,
        map: usize,
        sector: u64,
        regions: &[u64],
    ) -> io::Result<()> {
        self.change_bits(port, file, map, sector, |bits| {
            for region in regions {
                let bit = region % BITS;
                bits[bit as usize / 64] |= 1 << (bit % 64);
            }
        })
        .await
    }

    /// Changes the bits of one sector. It is read first: another host may have written it, while a migrating guest's
    /// disk is open on both.
    async fn change_bits(
        &self,
        port: &Port,
        file: FileId,
        map: usize,
        sector: u64,
        change: impl FnOnce(&mut [u64]),
    ) -> io::Result<()> {
        let (id, at) = {
            let head = &self.book().head;
            (head.file, place(head.bytes, map, sector))
        };
        let mut bytes = [0; SECTOR];
        {
            let piece = port.scratch.take(SECTOR).await;
            port.io.read_exact(file, at, piece.span()).await?;
            port.memory().copy_out(piece.span(), &mut bytes);
        }
        let mut bits =
            parse_sector(&id, map, sector, &bytes).unwrap_or([u64::MAX; BITS as usize / 64]);
        change(&mut bits);
        self.write(port, file, at, &sector_to_bytes(&id, map, sector, &bits)).await
    }

    async fn write(
        &self,
        port: &Port,
        file: FileId,
        at: u64,
        bytes: &[u8; SECTOR],
    ) -> io::Result<()> {
        let piece = port.scratch.take(SECTOR).await;
        port.memory().copy_in(piece.span(), bytes);
        port.io.write_all(file, at, piece.span()).await
    }

    /// Makes the maps void, since they cannot be written: the guest goes on without them.
    async fn give_up(&self, port: &Port, e: io::Error) -> io::Result<()> {
        let file = port.files[self.index];
        let head = Head { state: State::Void, ..self.book().head.clone() };
        let written = self.write(port, file, 0, &head.to_bytes()).await;
        let void = match written {
            Ok(()) => port.io.sync(file).await,
            Err(e) => Err(e),
        };
        let path = self.path.display();
        match void {
            Ok(()) => {
                if !self.is_off.swap(true, Ordering::AcqRel) {
                    tracing::error!(
                        "cannot write the dirty maps {path}: {e}; they are void from now on, and \
                         the disk goes on without them. Check the storage, make a full backup and \
                         begin the maps anew (ferrite image dirty add)"
                    );
                }
                Ok(())
            }
            Err(_) => Err(io::Error::new(
                e.kind(),
                format!("the dirty maps {path} can neither be written nor be made void: {e}"),
            )),
        }
    }

    /// The end of the image's orderly use, after its last flush. A later write begins another opening.
    ///
    /// # Errors
    /// The file cannot be written. The maps stay valid: the image counts as open.
    pub async fn close(&self, port: &Port, image: &Raw) -> io::Result<()> {
        let _alone = self.commits.pause(&port.io).await?;
        if !self.book().is_open || self.is_off.load(Ordering::Acquire) {
            return Ok(());
        }
        self.fine.end_opening();
        self.book().is_open = false;
        let (seconds, nanoseconds) = changed_at(image.fd())?;
        let state = State::Closed(seconds, nanoseconds);
        let head = Head { state, ..self.book().head.clone() };
        let file = port.files[self.index];
        self.write(port, file, 0, &head.to_bytes()).await?;
        port.io.sync(file).await
    }
}

/// Whether an image at this path has maps, as far as names tell.
pub fn has_maps(raw: &Raw) -> bool {
    ferrite_host::names::exists(path_of(raw.path()))
}
