//! The methods of the control socket about exports to other hosts.

use std::path::PathBuf;
use std::sync::Arc;

use super::devices::not_done;
use super::protocol::{ExportParams, ExportRow, ExportRows, RpcError, UnexportParams, code};
use crate::Shared;
use crate::exports::{self, Record, Row};
use crate::state_files::Stated;
use crate::vhost;

/// The queues of a front end, if no number is given.
const DEFAULT_QUEUES: u16 = 4;
/// Most places to listen of one export.
const MAX_LISTEN: usize = 16;

pub(crate) fn export(shared: &Arc<Shared>, asked: &ExportParams) -> Result<ExportRow, RpcError> {
    let invalid = |why: String, help: &str| RpcError::new(code::INVALID_PARAMS, why, help);
    if let Some(socket) = &asked.vhost_user {
        return export_by_vhost(shared, asked, socket);
    }
    if asked.tls.is_some() == asked.plain {
        let help = "give a folder of certificates (docs/access.md), or plain where all who reach the port may read";
        return Err(invalid("it is not said how clients are known".to_owned(), help));
    }
    let tls = asked.tls.as_ref().map(PathBuf::from);
    if tls.as_ref().is_some_and(|folder| !folder.is_absolute()) {
        let help = "write it from the root folder on";
        return Err(invalid("the folder of certificates has no absolute name".to_owned(), help));
    }
    if !(1..=MAX_LISTEN).contains(&asked.listen.len()) {
        let why = format!("1 to {MAX_LISTEN} places to listen are possible");
        return Err(invalid(why, "write ADDRESS:PORT"));
    }
    let mut listen = Vec::new();
    for place in &asked.listen {
        let help = "write 192.0.2.5:10809 or [2001:db8::5]:10809";
        let why = || format!("{place:.100} is no IP address with a port");
        listen.push(place.parse().map_err(|_| invalid(why(), help))?);
    }
    let record = Record {
        version: Record::VERSION,
        disk: asked.disk,
        listen,
        tls,
        any_client: asked.any_client,
        peers: Vec::new(),
        name: asked.name.clone().unwrap_or_default(),
        read_only: asked.read_only,
        no_list: asked.no_list,
        shared: asked.shared,
    };
    let made = exports::add(shared, record).map_err(not_done)?;
    Ok(row((made, None, None)))
}

fn export_by_vhost(
    shared: &Arc<Shared>,
    asked: &ExportParams,
    socket: &str,
) -> Result<ExportRow, RpcError> {
    let of_nbd = !asked.listen.is_empty()
        || asked.tls.is_some()
        || asked.any_client
        || asked.plain
        || asked.no_list;
    if of_nbd {
        let why = "a disk is exported by NBD or by vhost-user, not by both";
        return Err(RpcError::new(code::INVALID_PARAMS, why, "name one of them"));
    }
    let disk = asked.disk;
    let record = vhost::Record {
        version: vhost::Record::VERSION,
        disk,
        socket: PathBuf::from(socket),
        queues: asked.queues.unwrap_or(DEFAULT_QUEUES),
        name: asked.name.clone().unwrap_or_default(),
        read_only: asked.read_only,
        shared: asked.shared,
    };
    let made = vhost::add(shared, record).map_err(not_done)?;
    Ok(row_of_vhost((made, None)))
}

pub(super) fn unexport(shared: &Shared, asked: &UnexportParams) -> Result<ExportRow, RpcError> {
    if let Some(record) = vhost::remove(shared, asked.disk) {
        return Ok(row_of_vhost((record, None)));
    }
    Ok(row((exports::remove(shared, asked.disk).map_err(not_done)?, None, None)))
}

pub(crate) fn list(shared: &Shared) -> ExportRows {
    let mut rows: Vec<ExportRow> = exports::list(shared).into_iter().map(row).collect();
    rows.extend(vhost::list(shared).into_iter().map(row_of_vhost));
    rows.sort_by_key(|row| row.disk);
    ExportRows { exports: rows }
}

fn row_of_vhost((record, why): vhost::Row) -> ExportRow {
    ExportRow {
        disk: record.disk,
        name: record.name,
        listen: Vec::new(),
        vhost_user: Some(record.socket.to_string_lossy().into_owned()),
        tls: None,
        any_client: false,
        read_only: record.read_only,
        no_list: false,
        pid: None,
        why,
    }
}

fn row((record, pid, why): Row) -> ExportRow {
    ExportRow {
        disk: record.disk,
        name: record.name,
        listen: record.listen.iter().map(ToString::to_string).collect(),
        vhost_user: None,
        tls: record.tls.map(|folder| folder.to_string_lossy().into_owned()),
        any_client: record.any_client,
        read_only: record.read_only,
        no_list: record.no_list,
        pid,
        why,
    }
}
