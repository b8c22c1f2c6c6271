//! A queue that parses any bytes, without a disk: for tests and the fuzzer.

use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::fs::FileExt;
use std::sync::Arc;

use ferrite_io::foreign;

use super::chain::Chain;
use super::memory::Table;
use super::message::{RawAddresses, RawRegion};
use super::request::{Doing, ID_BYTES, Parsed, Request, Rules, parse};
use super::ring::{Broken, DESC_BYTES, Ring};
use crate::path::work::Work;

/// Bytes of the memory.
const BYTES: u64 = 64 << 10;
/// Where the guest's addresses begin.
const GUEST: u64 = 1 << 20;
/// Sectors of the largest part of a request.
const PART_SECTORS: u64 = 2048;

pub(super) fn requests_in(
    memory: &[u8],
    entries: u16,
    sectors: u64,
    read_only: bool,
) -> io::Result<Vec<(Work, Option<u64>)>> {
    let file = foreign::create("ferrite-look", BYTES)?;
    file.write_all_at(&memory[..memory.len().min(BYTES as usize)], 0)?;
    let region = RawRegion { guest: GUEST, len: BYTES, user: 0, offset: 0 };
    let table = Table::map(&[region], &[OwnedFd::from(file)]).map_err(io::Error::other)?;
    let avail = DESC_BYTES as u64 * u64::from(entries);
    let used = (avail + 6 + 2 * u64::from(entries)).next_multiple_of(16);
    let addresses = RawAddresses { desc: 0, avail, used };
    let ring = Ring::new(Arc::new(table), entries, addresses, 0, true);
    let Ok(Some(mut ring)) = ring else { return Err(io::ErrorKind::InvalidInput.into()) };
    let id = [0; ID_BYTES];
    let rules = Rules { sectors, read_only, discards: true, writes_through: false, id: &id };
    let mut found = Vec::new();
    let (mut chain, mut request) = (Chain::default(), Request::default());
    while let Ok(Some(parsed)) = next(&mut ring, &rules, &mut chain, &mut request) {
        if let Parsed::Work = parsed {
            look(&mut request, &mut found);
        }
    }
    Ok(found)
}

fn next(
    ring: &mut Ring,
    rules: &Rules<'_>,
    chain: &mut Chain,
    request: &mut Request,
) -> Result<Option<Parsed>, Broken> {
    if ring.waiting()? == 0 {
        return Ok(None);
    }
    let head = ring.peek()?;
    chain.read(ring, head, true)?;
    let parsed = parse(&ring.table, chain, rules, request)?;
    ring.advance();
    Ok(Some(parsed))
}

fn look(request: &mut Request, found: &mut Vec<(Work, Option<u64>)>) {
    // A request for many zeros has many parts, of which the last is as good as any.
    for _ in 0..64 {
        if request.left.is_empty() || (request.doing == Doing::Flush && request.under_way > 0) {
            return;
        }
        let has_data = matches!(request.doing, Doing::Read | Doing::Write);
        let room: u64 = request.data.iter().map(|place| place.len as u64).sum();
        let work = request.next_part(PART_SECTORS, || 4096);
        found.push((work, has_data.then(|| room - request.at)));
        request.took(&work);
    }
}
