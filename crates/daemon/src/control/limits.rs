//! The methods that change running disks: `disk.limit` and `disk.set`.

use ferrite_serve::blkif::lifecycle::Tune;

use super::methods::{found, settings};
use super::protocol::{LimitParams, Limited, RpcError, SetDone, SetParams, Setting, Source, code};
use crate::state::DiskId;
use crate::{Shared, tuning};

/// The most percent of a processor, as in the configuration.
const MOST_CPU: u32 = 6400;

/// Sets all limits of a disk.
pub(super) fn limit(shared: &Shared, request: &LimitParams) -> Result<Limited, RpcError> {
    let LimitParams { disk, limits } = *request;
    limits.check().map_err(|why| invalid(why, "docs/operations.md has the limits"))?;
    change(shared, disk, &Tune { limits: Some(limits), ..Tune::default() })?;
    Ok(Limited { disk, limits })
}

/// Changes settings of a disk.
pub(super) fn set(shared: &Shared, request: &SetParams) -> Result<SetDone, RpcError> {
    let SetParams { disk, on_full, poll_us, cpu } = *request;
    if cpu.is_some_and(|percent| percent > MOST_CPU) {
        let help = "it takes percent of a processor, from 0 to 6400; 0 is no limit";
        return Err(invalid("cpu is not valid".to_owned(), help));
    }
    change(shared, disk, &Tune { limits: None, on_full, poll_us, cpu })?;
    let is_made = |setting: &Setting| setting.from == Source::Running;
    let settings = settings(shared, disk).into_iter().filter(is_made).collect();
    Ok(SetDone { disk, settings })
}

fn change(shared: &Shared, id: DiskId, tune: &Tune) -> Result<(), RpcError> {
    found(shared, id)?;
    tuning::set(shared, id, tune).map_err(|e| RpcError::new(code::FAILED, e.why, &e.help))
}

fn invalid(why: String, help: &str) -> RpcError {
    RpcError::new(code::INVALID_PARAMS, why, help)
}
