//! The methods of the control socket about devices of this host.

use std::path::Path;
use std::sync::Arc;

use serde_json::Value;

use super::methods::{reply, take};
use super::pauses::image;
use super::protocol::{
    AddDeviceParams, CleanedDevices, DeviceRow, DeviceRows, Nothing, RemoveDeviceParams, RpcError,
    code,
};
use crate::devices::{self, MAX_CONNECTIONS, Name, NotDone, Record, Wish};
use crate::{Failure, Shared};

/// Calls a method whose name begins with `device.`. `None`: there is no such method.
pub(super) fn call(
    shared: &Arc<Shared>,
    method: &str,
    params: Value,
) -> Option<Result<Value, RpcError>> {
    Some(match method {
        "device.add" => take(params).and_then(|request| reply(&add(shared, &request)?)),
        "device.remove" => take(params).and_then(|request| reply(&remove(shared, &request)?)),
        "device.list" => take::<Nothing>(params).and_then(|_| reply(&list(shared))),
        "device.clean" => take::<Nothing>(params).and_then(|_| {
            let path = |name: Name| name.path().display().to_string();
            let removed = devices::clean(shared).into_iter().map(path).collect();
            reply(&CleanedDevices { removed })
        }),
        _ => return None,
    })
}

fn add(shared: &Arc<Shared>, request: &AddDeviceParams) -> Result<DeviceRow, RpcError> {
    if !(1..=MAX_CONNECTIONS).contains(&request.connections) {
        let why = format!("a device has no {} connections", request.connections);
        let help = format!("1 to {MAX_CONNECTIONS} are possible");
        return Err(RpcError::new(code::INVALID_PARAMS, why, &help));
    }
    let wish = Wish {
        kind: request.by.unwrap_or_default(),
        read_only: request.read_only,
        shared: request.shared,
        connections: request.connections,
    };
    let made = match (request.disk, &request.image) {
        (Some(disk), None) => devices::add(shared, disk, wish),
        (None, Some(name)) => devices::add_image(shared, &image(name)?, wish),
        _ => {
            let why = "a disk or an image is named, not both";
            return Err(RpcError::new(code::INVALID_PARAMS, why, "name one of them"));
        }
    };
    Ok(row(shared, made.map_err(not_done)?, Vec::new()))
}

fn remove(shared: &Arc<Shared>, request: &RemoveDeviceParams) -> Result<DeviceRow, RpcError> {
    let name = Name::of(Path::new(&request.device)).ok_or_else(|| {
        let why = format!("{:.200} is no name of a device", request.device);
        RpcError::new(code::INVALID_PARAMS, why, "it is /dev/nbdN or /dev/ublkbN")
    })?;
    let removed = devices::remove(shared, name).map_err(not_done)?;
    Ok(row(shared, removed, Vec::new()))
}

fn list(shared: &Shared) -> DeviceRows {
    let rows = devices::list(shared).into_iter();
    DeviceRows { devices: rows.map(|found| row(shared, found.record, found.users)).collect() }
}

fn row(shared: &Shared, record: Record, users: Vec<String>) -> DeviceRow {
    let name = |disk| {
        let image = shared.table.read(|disks| disks.get(&disk)?.image.clone())?;
        Some(image.name().to_string_lossy().into_owned())
    };
    DeviceRow {
        device: record.path().display().to_string(),
        image: name(record.disk),
        disk: record.disk,
        bytes: record.bytes,
        read_only: record.read_only,
        connections: record.connections,
        by: record.kind,
        users,
    }
}

pub(super) fn not_done(e: NotDone) -> RpcError {
    let (code, Failure { why, help }) = match e {
        NotDone::Missing(failure) => (code::NO_DISK, failure),
        NotDone::InUse(failure) => (code::IN_USE, failure),
        NotDone::Failed(failure) => (code::FAILED, failure),
    };
    RpcError::new(code, why, &help)
}
