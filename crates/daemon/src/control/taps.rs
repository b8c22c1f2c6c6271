//! The methods of the control socket about taps.

use std::sync::Arc;

use rustix::io::Errno;
use serde_json::Value;

use super::methods::{list, reply, take};
use super::pauses::{image, seconds};
use super::protocol::{Help, MinorParams, Nothing, RpcError, TapDone, TapParams, TapRows, code};
use crate::Shared;
use crate::params::Image;
use crate::taps::{self, Extras, Second, TapError};

/// Calls a method whose name begins with `tap.`. `None`: there is no such method.
pub(super) fn call(
    shared: &Arc<Shared>,
    method: &str,
    params: Value,
) -> Option<Result<Value, RpcError>> {
    Some(match method {
        "tap.list" => take::<Nothing>(params).and_then(|_| reply(&rows(shared))),
        "tap.allocate" => take::<Nothing>(params).and_then(|_| {
            let minor = taps::allocate(shared).map_err(refused)?;
            reply(&TapDone { minor: Some(minor), pid: None })
        }),
        "tap.spawn" => take::<Nothing>(params).and_then(|_| {
            let pid = taps::spawn(shared).map_err(refused)?;
            reply(&TapDone { minor: None, pid: Some(pid) })
        }),
        "tap.attach" => done(params, |tap| taps::attach(shared, tap.pid, tap.minor)),
        "tap.open" => done(params, |tap| {
            let image = named(tap)?.ok_or_else(empty)?;
            taps::open(shared, tap.pid, tap.minor, &image, tap.read_only, extras(tap)?)
        }),
        "tap.pause" => {
            done(params, |tap| taps::pause(shared, tap.pid, tap.minor, seconds(tap.timeout_s)))
        }
        "tap.unpause" => {
            done(params, |tap| taps::unpause(shared, tap.pid, tap.minor, named(tap)?, extras(tap)?))
        }
        "tap.close" => done(params, |tap| {
            taps::close(shared, tap.pid, tap.minor, tap.force, seconds(tap.timeout_s))
        }),
        "tap.detach" => done(params, |tap| taps::detach(shared, tap.pid, tap.minor)),
        "tap.free" => take::<MinorParams>(params).and_then(|tap| {
            taps::free(shared, tap.minor).map_err(refused)?;
            reply(&TapDone { minor: Some(tap.minor), pid: None })
        }),
        "tap.stats" => take::<MinorParams>(params).and_then(|tap| {
            let seen = taps::statistics(shared, tap.minor);
            reply(&seen.map_err(|failure| refused(TapError { errno: Errno::NOENT, failure }))?)
        }),
        _ => return None,
    })
}

/// All taps, and the disks that are none.
fn rows(shared: &Shared) -> TapRows {
    let mut disks = list(shared).disks;
    disks.retain(|disk| !disk.disk.is_tap());
    TapRows { taps: taps::list(shared), disks: Some(disks) }
}

fn done(
    params: Value,
    call: impl FnOnce(&TapParams) -> Result<(), TapError>,
) -> Result<Value, RpcError> {
    let tap: TapParams = take(params)?;
    call(&tap).map_err(refused)?;
    reply(&TapDone { minor: Some(tap.minor), pid: Some(tap.pid) })
}

/// Most bytes of a path. A longer one names no file, and state files have room for these.
const MAX_PATH: usize = 4096;

/// The image that is named, if one is.
fn named(tap: &TapParams) -> Result<Option<Image>, TapError> {
    let Some(name) = &tap.image else { return Ok(None) };
    if name.len() > MAX_PATH {
        let why = format!("the image's name has more than {MAX_PATH} bytes");
        return Err(TapError::new(Errno::NAMETOOLONG, why, "name it by a shorter path"));
    }
    image(name).map(Some).map_err(|e| {
        let help = e.data.map(|data| data.help).unwrap_or_default();
        match name.split_once(':') {
            Some((_, "")) | None => empty(),
            _ => TapError::new(Errno::INVAL, e.message, &help),
        }
    })
}

/// The log of changed blocks, and the second disk that writes go to.
fn extras(tap: &TapParams) -> Result<Extras, TapError> {
    if tap.log.as_ref().is_some_and(|log| log.as_os_str().len() > MAX_PATH) {
        let why = format!("the log's name has more than {MAX_PATH} bytes");
        return Err(TapError::new(Errno::NAMETOOLONG, why, "name it by a shorter path"));
    }
    let mirror = tap.mirror.as_deref().map(Second::parse).transpose()?;
    Ok(Extras { log: tap.log.clone(), mirror })
}

fn empty() -> TapError {
    TapError::new(Errno::NOMEDIUM, "no image is named".to_owned(), "name it as TYPE:PATH")
}

fn refused(e: TapError) -> RpcError {
    let TapError { errno, failure } = e;
    let data = Help { help: failure.help, errno: Some(errno.raw_os_error()) };
    RpcError { code: code::FAILED, message: failure.why, data: Some(data) }
}
