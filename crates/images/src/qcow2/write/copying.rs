//! Copies a cluster that cannot be written in place: a new place gets the written data and the rest of the cluster.

use std::io;

use ferrite_disk_base::{Extent, Port};
use ferrite_io::arena::Span;
use ferrite_io::scratch::{MAX_PIECE_BYTES, Piece};

use crate::image::backing::Backing;
use crate::image::format::ImageFormat;
use crate::image::mapping::Mapping;
use crate::qcow2::alloc::fresh::{Fate, Fresh};
use crate::qcow2::format::entry::{Cluster, own};
use crate::qcow2::format::extended::{self, Part};
use crate::qcow2::tables::meta::{self, TRIES, out_of_memory};
use crate::qcow2::{CLUSTER_LOCKS, Qcow2};

/// A cluster that gets a new place. While this lives it gets no other one.
struct Copying<'a> {
    image: &'a Qcow2,
    cluster: u64,
    old: u64,
    /// The bitmap of the subclusters of a mixed cluster.
    bitmap: u64,
    /// Byte offset of the new place.
    host: u64,
    zeroed: bool,
    /// The place, if it is a fresh cluster.
    fresh: Option<Fresh<'a>>,
}

impl Copying<'_> {
    fn becomes(&self, fate: Fate) {
        if let Some(fresh) = &self.fresh {
            fresh.becomes(fate);
        }
    }

    /// See [`Fresh::is_good_without`].
    fn is_good_without<T>(&self, done: io::Result<T>) -> io::Result<T> {
        done.inspect_err(|_| self.becomes(Fate::Good))
    }
}

impl Drop for Copying<'_> {
    fn drop(&mut self) {
        self.image.state().copying.remove(&self.cluster);
    }
}

/// The way to write a cluster that could not be written in place.
enum Begun<'a> {
    /// Copy it to a new place.
    Copying(Copying<'a>),
    /// Another write has got a place meanwhile: nothing has to be copied.
    Join(u64),
    /// Metadata has to be prepared first.
    NotYet,
}

impl Qcow2 {
    /// Writes `buf`, part of one cluster that cannot be written in place, and the rest of the cluster, to a new place.
    pub(crate) async fn write_copying(
        &self,
        port: &Port,
        below: impl Backing,
        offset: u64,
        buf: Span,
    ) -> io::Result<()> {
        let (cluster, within) = self.split(offset);
        let lock = &self.clusters[(cluster % CLUSTER_LOCKS as u64) as usize];
        let _alone = lock.lock(&port.io).await?;
        for _ in 0..TRIES {
            match self.reserve(below, offset, buf.len() as u64) {
                // Another task has copied it meanwhile.
                Mapping::Data { offset: to, len } => {
                    let part = buf.slice(0, buf.len().min(len as usize));
                    port.io.write_all(port.files[0], to, part).await?;
                    self.written(offset, part.len() as u64);
                    if part.len() == buf.len() {
                        return Ok(());
                    }
                }
                Mapping::Cow { .. } => match self.begin_copying(port, cluster).await? {
                    Begun::Copying(copying) => {
                        if self.copy(port, below, copying, offset, buf).await? {
                            return Ok(());
                        }
                    }
                    Begun::Join(host) => {
                        port.io.write_all(port.files[0], host + within, buf).await?;
                        self.written(offset, buf.len() as u64);
                        return Ok(());
                    }
                    Begun::NotYet => {
                        self.prepare(port, offset).await?;
                    }
                },
                _ => self.prepare(port, offset).await?,
            }
        }
        Err(out_of_memory())
    }

    /// Finds a new place for a cluster.
    async fn begin_copying(&self, port: &Port, cluster: u64) -> io::Result<Begun<'_>> {
        let Some((old, bitmap)) = self.entry_with_bitmap(cluster) else {
            return Ok(Begun::NotYet);
        };
        let own_place = match self.decode(old) {
            // Zeros with a place: the place is not read before the entry refers to it. Nor are the subclusters of a mixed
            // cluster that have no data; the others are written in place, and keep their data around `buf`.
            Some(
                Cluster::Zero { host: Some(host), copied: true }
                | Cluster::Mixed { host: Some(host), copied: true },
            ) if host + self.cluster_bytes() <= self.alloc.limit() => Some(host),
            Some(_) => None,
            None => return self.check_entry(cluster).map(|()| Begun::NotYet),
        };
        let mut copying = {
            let mut state = self.state();
            if let Some(host) = state.pending.get(&cluster) {
                return Ok(Begun::Join(*host));
            }
            state.copying.insert(cluster);
            let host = own_place.unwrap_or(0);
            Copying { image: self, cluster, old, bitmap, host, zeroed: false, fresh: None }
        };
        if own_place.is_none() {
            let fresh = self.alloc.take(port).await?;
            (copying.host, copying.zeroed) = (fresh.offset(), fresh.zeroed);
            copying.fresh = Some(fresh);
        }
        Ok(Begun::Copying(copying))
    }

    /// Copies; `false`: the cluster has changed meanwhile.
    async fn copy(
        &self,
        port: &Port,
        below: impl Backing,
        copying: Copying<'_>,
        offset: u64,
        buf: Span,
    ) -> io::Result<bool> {
        let (cluster, old, host) = (copying.cluster, copying.old, copying.host);
        let mut done = self.copy_pieces(port, below, &copying, offset, buf).await;
        if done.is_ok() {
            copying.becomes(Fate::Good);
        }
        for _ in 0..TRIES {
            if done.is_err() || self.entry(cluster).is_some_and(|entry| entry != old) {
                break;
            }
            if self.publish_if(cluster, old, own(host)) {
                copying.becomes(Fate::Referred);
                return Ok(true);
            }
            done = self.prepare_entry(port, offset).await;
        }
        done.map(|()| false)
    }

    /// Fills the new place of a cluster, a piece of scratch memory at a time: data of `buf`, the rest from the old
    /// place.
    async fn copy_pieces(
        &self,
        port: &Port,
        below: impl Backing,
        copying: &Copying<'_>,
        offset: u64,
        buf: Span,
    ) -> io::Result<()> {
        let size = self.cluster_bytes();
        let start = copying.cluster * size;
        let (from, to) = (offset - start, offset - start + buf.len() as u64);
        let source = copying.is_good_without(self.source(port, copying).await)?;
        // Zeros of the piece need not be written into space that is zeros.
        let skip = copying.zeroed && matches!(source, Source::Zeros);
        let mut at = 0;
        while at < size {
            let end = (at + MAX_PIECE_BYTES as u64).min(size);
            // The part of the piece that is in the buffer.
            let (first, last) = (from.clamp(at, end), to.clamp(at, end));
            if first < last && (skip || (first == at && last == end)) {
                let part = buf.slice((first - from) as usize, (last - first) as usize);
                port.io.write_all(port.files[0], copying.host + first, part).await?;
            } else if !skip {
                let part = (first < last)
                    .then(|| buf.slice((first - from) as usize, (last - first) as usize));
                self.copy_piece(port, below, copying, &source, (at, end), (first, part)).await?;
            }
            at = end;
        }
        Ok(())
    }

    async fn copy_piece(
        &self,
        port: &Port,
        below: impl Backing,
        copying: &Copying<'_>,
        source: &Source,
        (at, end): (u64, u64),
        (first, part): (u64, Option<Span>),
    ) -> io::Result<()> {
        let memory = port.memory();
        let len = (end - at) as usize;
        let piece = match source {
            Source::Below | Source::Mixed(_) => {
                let piece = self.piece_of_below(port, below, copying, at, len).await;
                copying.is_good_without(piece)?
            }
            _ => port.scratch.take(len).await,
        };
        let span = piece.span();
        match source {
            Source::Zeros => memory.fill(span, 0),
            Source::Bytes(bytes) => memory.copy_in(span, &bytes[at as usize..end as usize]),
            Source::File(host) => {
                let got = meta::read_part(port, port.files[0], host + at, span).await;
                let got = copying.is_good_without(got)?;
                memory.fill(span.slice(got, span.len() - got), 0);
            }
            Source::Mixed(host) => {
                let got = self.copy_mixed(port, copying, *host, at, span).await;
                copying.is_good_without(got)?;
            }
            Source::Below => {}
        }
        if let Some(part) = part {
            let mut bytes = vec![0; part.len()];
            memory.copy_out(part, &mut bytes);
            memory.copy_in(span.slice((first - at) as usize, part.len()), &bytes);
        }
        port.io.write_all(port.files[0], copying.host + at, span).await
    }

    /// Lays the subclusters that this image has over the data below them, for the part of a cluster from `at` on.
    async fn copy_mixed(
        &self,
        port: &Port,
        copying: &Copying<'_>,
        host: Option<u64>,
        at: u64,
        span: Span,
    ) -> io::Result<()> {
        let mut done = 0;
        while done < span.len() {
            let from = at + done as u64;
            let (part, len) = extended::part(copying.bitmap, from, self.header.cluster_bits);
            let here = span.slice(done, (len as usize).min(span.len() - done));
            match (part, host) {
                (Part::Data, Some(host)) => {
                    let got = meta::read_part(port, port.files[0], host + from, here).await?;
                    port.memory().fill(here.slice(got, here.len() - got), 0);
                }
                (Part::Zeros, _) => port.memory().fill(here, 0),
                (Part::Below | Part::Data, _) => {}
            }
            done += here.len();
        }
        Ok(())
    }

    /// A piece of scratch memory with the data below a part of a cluster.
    ///
    /// A task that holds scratch memory may not wait for more. So if the layers below have all needed metadata in
    /// memory, their data are read by their places (parents do not change). Otherwise one task at a time may hold a
    /// piece while the layers take more.
    async fn piece_of_below(
        &self,
        port: &Port,
        below: impl Backing,
        copying: &Copying<'_>,
        at: u64,
        len: usize,
    ) -> io::Result<Piece> {
        let start = copying.cluster * self.cluster_bytes() + at;
        // Past the end of the disk no layer has data.
        let there = self.bytes().saturating_sub(start).min(len as u64) as usize;
        let (extents, nested) = match in_memory(below, start, there as u64) {
            Some(extents) => (Some(extents), None),
            None => (None, Some(self.nested.lock(&port.io).await?)),
        };
        let piece = port.scratch.take(len).await;
        let span = piece.span();
        port.memory().fill(span.slice(there, len - there), 0);
        let Some(extents) = extents else {
            if there > 0 {
                below.read(port, start, span.slice(0, there)).await?;
            }
            drop(nested);
            return Ok(piece);
        };
        let mut done = 0;
        for extent in extents {
            match extent {
                Extent::Data { file, offset, len } => {
                    let part = span.slice(done, len as usize);
                    port.io.read_exact(port.files[file], offset, part).await?;
                    done += len as usize;
                }
                Extent::Zeros { len } | Extent::Slow { len } => {
                    port.memory().fill(span.slice(done, len as usize), 0);
                    done += len as usize;
                }
            }
        }
        Ok(piece)
    }

    /// The place of the old bytes of a cluster.
    async fn source(&self, port: &Port, copying: &Copying<'_>) -> io::Result<Source> {
        Ok(match self.decode(copying.old) {
            Some(Cluster::Data { host, .. }) => Source::File(host),
            Some(Cluster::Zero { .. }) => Source::Zeros,
            Some(Cluster::Packed(packed)) => {
                Source::Bytes(self.unpacked(port, port.files[0], packed).await?)
            }
            Some(Cluster::Mixed { host, .. }) => Source::Mixed(host),
            Some(Cluster::Unallocated) => Source::Below,
            None => return Err(meta::damaged("an entry that cannot be read")),
        })
    }
}

/// The layers' places of a range; `None`: finding them takes I/O.
fn in_memory(below: impl Backing, start: u64, len: u64) -> Option<Vec<Extent>> {
    let (mut at, end) = (start, start + len);
    let mut extents = Vec::new();
    while at < end {
        let extent = below.map(at, end - at);
        at += match extent {
            Extent::Data { len, .. } | Extent::Zeros { len } => len.max(1),
            Extent::Slow { .. } => return None,
        };
        extents.push(extent);
    }
    Some(extents)
}

/// The source of the bytes of a cluster.
enum Source {
    Zeros,
    Bytes(Vec<u8>),
    File(u64),
    Below,
    /// Some of its subclusters are in this place.
    Mixed(Option<u64>),
}
