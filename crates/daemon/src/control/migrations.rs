//! The methods of the control socket about migrations to and from other hosts.

use std::sync::Arc;

use serde_json::Value;

use super::methods::{reply, take};
use super::protocol::{
    Holder, MigrateCommitParams, MigratePrepareParams, MigrateResolveParams, MigrateRunParams,
    Migration, MigrationDirection, MigrationList, MigrationParams, Nothing, RpcError, code,
};
use crate::migration;
use crate::migration::records::{Incoming, Outgoing};
use crate::migration::send::{self, Wanted};
use crate::migration::token::{Receiver, Sender};
use crate::{Failure, Shared};

/// Calls a method whose name begins with `migrate.`. `None`: there is no such method.
pub(super) fn call(
    shared: &Arc<Shared>,
    method: &str,
    params: Value,
) -> Option<Result<Value, RpcError>> {
    Some(match method {
        "migrate.prepare" => take(params).and_then(|asked| reply(&prepare(shared, &asked)?)),
        "migrate.run" => take::<MigrateRunParams>(params).and_then(|asked| {
            let record = send::of_disk(shared, asked.disk).map_err(failed)?;
            send::run(shared, &record, asked.speed).map_err(failed)?;
            reply(&out(shared, &record.id)?)
        }),
        "migrate.commit" => take::<MigrateCommitParams>(params).and_then(|asked| {
            let record = send::of_disk(shared, asked.disk).map_err(failed)?;
            send::commit(shared, asked.disk, asked.keep).map_err(failed)?;
            reply(&out(shared, &record.id)?)
        }),
        "migrate.abort" => take::<MigrationParams>(params).and_then(|asked| {
            let record = send::abort(shared, &asked.id).map_err(failed)?;
            reply(&describe_out(shared, record))
        }),
        "migrate.resolve" => take::<MigrateResolveParams>(params).and_then(|asked| {
            migration::resolve(shared, &asked.id, asked.here).map_err(failed)?;
            let all = list(shared).migrations;
            let found = all.into_iter().find(|it| it.id == asked.id);
            reply(&found.ok_or_else(|| failed(no_longer()))?)
        }),
        "migrate.forget" => take::<MigrationParams>(params).and_then(|asked| {
            migration::forget(shared, &asked.id).map_err(failed)?;
            reply(&list(shared))
        }),
        "migrate.list" => take::<Nothing>(params).and_then(|_| reply(&list(shared))),
        _ => return None,
    })
}

fn no_longer() -> Failure {
    let why = "its record is gone".to_owned();
    Failure { why, help: "ferrite migrate list shows all".to_owned() }
}

fn failed(Failure { why, help }: Failure) -> RpcError {
    RpcError::new(code::FAILED, why, &help)
}

fn prepare(shared: &Arc<Shared>, asked: &MigratePrepareParams) -> Result<Migration, RpcError> {
    let at_rest = "ferrite image convert copies images at rest";
    let image = super::jobs::served_image(shared, asked.disk, at_rest)?;
    let wanted =
        Wanted { name: asked.name.as_deref(), base: asked.base.as_deref(), chain: asked.chain };
    let made = send::prepare(shared, asked.disk, &image, &asked.host, &wanted).map_err(failed)?;
    Ok(describe_out(shared, made))
}

fn out(shared: &Shared, id: &str) -> Result<Migration, RpcError> {
    Ok(describe_out(shared, send::read(shared, id).map_err(failed)?))
}

fn list(shared: &Shared) -> MigrationList {
    let records = &shared.migration.records;
    let outgoing = records.all::<Outgoing>().into_iter().map(|it| describe_out(shared, it));
    let incoming = records.all::<Incoming>().into_iter().map(|it| describe_in(shared, it));
    let mut migrations: Vec<Migration> = outgoing.chain(incoming).collect();
    migrations.sort_by_key(|it| it.created);
    MigrationList { migrations }
}

fn describe_out(shared: &Shared, record: Outgoing) -> Migration {
    let trouble = shared.migration.trouble(&record.id).filter(|_| !record.done);
    let (why, help) = trouble.map(|e| (e.why, e.help)).unzip();
    Migration {
        job: shared.jobs.migrating(&record.id),
        direction: MigrationDirection::Out,
        disk: Some(record.disk),
        image: record.image.path.to_string_lossy().into_owned(),
        host: Some(record.host),
        target: Some(record.target).filter(|target| !target.is_empty()),
        holder: match record.state {
            Sender::Owner => Holder::Here,
            Sender::Leaving => Holder::Doubt,
            Sender::Moved => Holder::There,
        },
        over: record.done,
        created: record.created,
        why: why.or(record.note),
        help,
        id: record.id,
    }
}

fn describe_in(shared: &Shared, record: Incoming) -> Migration {
    let (why, help) = shared.migration.trouble(&record.id).map(|e| (e.why, e.help)).unzip();
    Migration {
        job: None,
        direction: MigrationDirection::In,
        disk: None,
        image: record.path.to_string_lossy().into_owned(),
        host: None,
        target: None,
        holder: match record.state {
            Receiver::Incoming => Holder::Doubt,
            Receiver::Taken => Holder::Here,
            Receiver::Aborted => Holder::There,
        },
        over: record.state != Receiver::Incoming,
        created: record.created,
        why,
        help,
        id: record.id,
    }
}
