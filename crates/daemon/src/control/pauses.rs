//! The methods that pause a disk and let it go on, and those that change it meanwhile.

use std::time::Duration;

use super::methods::{MAX_WAIT, found, no_disk};
use super::protocol::{
    Attached, DirtyParams, PauseParams, ResizeParams, ResumeParams, RpcError, SnapshotParams,
    SwitchParams, code,
};
use crate::params::{Image, Params};
use crate::pause::{self, NotDone, Pause};
use crate::state::DiskId;
use crate::{Failure, Shared, verbs};

pub(super) fn pause(shared: &Shared, request: &PauseParams) -> Result<Attached, RpcError> {
    let id = request.disk;
    pause::pause(shared, id, &Pause::by(&request.by), seconds(request.timeout_s))
        .map_err(|e| not_done(id, e))?;
    Ok(Attached { disk: found(shared, id)? })
}

pub(super) fn resume(shared: &Shared, request: &ResumeParams) -> Result<Attached, RpcError> {
    let id = request.disk;
    let image = request.image.as_deref().map(image).transpose()?;
    pause::resume(shared, id, image, false, seconds(request.timeout_s))
        .map_err(|e| not_done(id, e))?;
    Ok(Attached { disk: found(shared, id)? })
}

pub(super) fn snapshot(shared: &Shared, request: &SnapshotParams) -> Result<Attached, RpcError> {
    let id = request.disk;
    let (leaf, begin) = (request.leaf, request.begin_map.as_deref());
    verbs::snapshot(shared, id, &request.name, leaf, begin).map_err(|e| not_done(id, e))?;
    Ok(Attached { disk: found(shared, id)? })
}

pub(super) fn dirty(shared: &Shared, request: &DirtyParams) -> Result<Attached, RpcError> {
    let id = request.disk;
    verbs::dirty(shared, id, request.verb, &request.map).map_err(|e| not_done(id, e))?;
    Ok(Attached { disk: found(shared, id)? })
}

pub(super) fn resize(shared: &Shared, request: &ResizeParams) -> Result<Attached, RpcError> {
    let id = request.disk;
    verbs::resize(shared, id, request.bytes, request.is_more).map_err(|e| not_done(id, e))?;
    Ok(Attached { disk: found(shared, id)? })
}

pub(super) fn switch(shared: &Shared, request: &SwitchParams) -> Result<Attached, RpcError> {
    let (id, next) = (request.disk, image(&request.image)?);
    verbs::switch(shared, id, &next, request.compare).map_err(|e| not_done(id, e))?;
    Ok(Attached { disk: found(shared, id)? })
}

/// The image that a parameter names.
pub(super) fn image(name: &str) -> Result<Image, RpcError> {
    let why = match Params::parse(name.as_bytes()) {
        Params::Image(image) if image.path.is_absolute() || image.export().is_some() => {
            return Ok(image);
        }
        Params::Image(_) => "the image's path is not absolute".to_owned(),
        Params::Empty | Params::Tap => "no image is named".to_owned(),
        Params::Invalid(why) => why,
    };
    Err(RpcError::new(code::INVALID_PARAMS, why, "name it as FORMAT:PATH, as xl does"))
}

pub(super) fn seconds(seconds: u32) -> Duration {
    Duration::from_secs(seconds.into()).min(MAX_WAIT)
}

pub(super) fn not_done(id: DiskId, e: NotDone) -> RpcError {
    let of = |code, Failure { why, help }| RpcError::new(code, why, &help);
    match e {
        NotDone::NoDisk => no_disk(id),
        NotDone::NotInTime(failure) => of(code::TIMEOUT, failure),
        NotDone::Failed(failure) => of(code::FAILED, failure),
    }
}
