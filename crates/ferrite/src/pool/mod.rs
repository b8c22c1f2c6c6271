//! `ferrite pool`: the map of the disks of a pool of servers. `ferrite_pool_map` does the work; this module has names,
//! options and text.

use ferrite_etcd::Cluster;
use ferrite_pool_map::{Access, Error, Id, NewDisk, Replaced, Shape};
use serde::Serialize;

use crate::exit::{Code, Failure};
use crate::image::{json, print};

mod announce;
pub(crate) mod args;
pub(crate) mod health;
mod luns;
mod own;
mod repair;
mod serve;
mod settings;
mod status;

use args::{CreateArgs, DrainArgs, PoolArgs, PoolCommand, ReplaceArgs};
use status::{DiskStatus, Status};

/// Runs one command.
pub(crate) fn run(args: &PoolArgs) -> Result<(), Failure> {
    settings::must_be_allowed(args)?;
    let say = Say { json: args.json };
    match &args.command {
        PoolCommand::Init(of) => {
            let pool = access(args, &of.pool)?.init().map_err(|e| failed("make the pool", &e))?;
            let made = Made { pool: of.pool.clone(), id: pool.id };
            say.say(&made, |made| format!("pool {}: {}\n", made.pool, made.id))
        }
        PoolCommand::Create(create) => create_disk(args, create, &say),
        PoolCommand::List(of) => {
            let status = read(args, &of.pool)?;
            say.say(&status.disks, |disks| status::list(disks))
        }
        PoolCommand::Status(of) => {
            let (pool, disk) = &of.of;
            let status = read(args, pool)?;
            match disk {
                None => say.say(&status, status::pool),
                Some(disk) => say.say(find(&status, disk)?, status::disk),
            }
        }
        PoolCommand::Resize(resize) => {
            let pool = access(args, &resize.disk.pool)?;
            let done = pool.resize(&resize.disk.disk, resize.size);
            done.map_err(|e| failed("make the disk larger", &e))?;
            say_disk(&pool, &resize.disk.disk, &say)
        }
        PoolCommand::Delete(delete) => {
            let pool = access(args, &delete.disk.pool)?;
            let done = pool.delete(&delete.disk.disk, delete.force);
            done.map_err(|e| failed("remove the disk", &e))
        }
        PoolCommand::Replace(replace) => replace_copies(args, replace, &say),
        PoolCommand::Drain(drain) => drain_server(args, drain, &say),
        PoolCommand::Own(own) => own::run(args, own),
        PoolCommand::Serve(server) => serve::run(args, server),
        PoolCommand::Repair(of) => repair::run(args, &of.disk, &say),
        PoolCommand::AddLun(lun) => luns::add(&access(args, &lun.pool)?, lun),
        PoolCommand::RemoveLun(lun) => luns::remove(&access(args, &lun.pool)?, lun),
        PoolCommand::Steal(of) => {
            let pool = access(args, &of.disk.pool)?;
            let had_owner = pool.steal(&of.disk.disk).map_err(|e| failed("take the disk", &e))?;
            say.say(&Stolen { had_owner }, |stolen| match stolen.had_owner {
                true => "its owner has lost it\n".to_owned(),
                false => "it had no owner\n".to_owned(),
            })
        }
    }
}

#[derive(Serialize)]
struct Made {
    pool: String,
    id: Id,
}

#[derive(Serialize)]
struct Stolen {
    had_owner: bool,
}

/// A replaced copy, for JSON.
#[derive(Serialize)]
struct Moved {
    disk: String,
    set: usize,
    from: String,
    to: String,
    done: bool,
}

impl From<Replaced> for Moved {
    fn from(it: Replaced) -> Moved {
        let Replaced { disk, set, from, to, done } = it;
        Moved { disk, set, from, to, done }
    }
}

/// How results are printed.
struct Say {
    json: bool,
}

impl Say {
    fn say<T: Serialize + ?Sized>(
        &self,
        result: &T,
        text: impl Fn(&T) -> String,
    ) -> Result<(), Failure> {
        print(&if self.json { json(&result)? + "\n" } else { text(result) })
    }
}

fn access(args: &PoolArgs, pool: &str) -> Result<Access, Failure> {
    let cluster =
        Cluster::new(&settings::of(args, pool)?).map_err(|e| failed("ask etcd", &e.into()))?;
    Access::new(cluster, pool).map_err(|e| failed("use the pool", &e))
}

fn read(args: &PoolArgs, pool: &str) -> Result<Status, Failure> {
    let access = access(args, pool)?;
    let state = access.state().map_err(|e| failed("read the pool", &e))?;
    Ok(Status::of(pool, &state))
}

fn find<'a>(status: &'a Status, disk: &str) -> Result<&'a DiskStatus, Failure> {
    let none = || {
        let why = format!("the pool {} has no disk {disk}", status.pool);
        Failure::new("cannot show the disk", why, "ferrite pool list shows the disks")
            .with_code(Code::NOT_FOUND)
    };
    status.disks.iter().find(|it| it.name == disk).ok_or_else(none)
}

fn say_disk(pool: &Access, disk: &str, say: &Say) -> Result<(), Failure> {
    let state = pool.state().map_err(|e| failed("read the pool", &e))?;
    say.say(find(&Status::of(pool.name(), &state), disk)?, status::disk)
}

fn create_disk(args: &PoolArgs, create: &CreateArgs, say: &Say) -> Result<(), Failure> {
    let pool = access(args, &create.disk.pool)?;
    let CreateArgs { replicas, stripes, stripe_size, .. } = *create;
    let shape = Shape { replicas, stripes, stripe_size };
    let request = create.request.unwrap_or_else(Id::random);
    let new = NewDisk { bytes: create.size, shape, request, on: create.on.clone() };
    let done = pool.create(&create.disk.disk, &new);
    done.map_err(|e| match e {
        Error::Unsettled(_) => failed("make the disk", &e)
            .with_more_help(&format!("repeat the command with --request {request}")),
        e => failed("make the disk", &e),
    })?;
    say_disk(&pool, &create.disk.disk, say)
}

fn replace_copies(args: &PoolArgs, replace: &ReplaceArgs, say: &Say) -> Result<(), Failure> {
    let pool = access(args, &replace.disk.pool)?;
    let done = pool.replace(&replace.disk.disk, &replace.server, replace.by.as_deref());
    let all = done.map_err(|e| failed("replace the copies", &e))?;
    say_moved(all, say)
}

/// First the server gets nothing new, then each disk is a transaction of its own: what was done stays done.
fn drain_server(args: &PoolArgs, drain: &DrainArgs, say: &Say) -> Result<(), Failure> {
    let pool = access(args, &drain.pool)?;
    let done = pool.set_drained(&drain.server, !drain.undo);
    done.map_err(|e| failed("drain the server", &e))?;
    if drain.undo {
        return Ok(());
    }
    let state = pool.state().map_err(|e| failed("read the pool", &e))?;
    let has =
        |disk: &ferrite_pool_map::Disk| disk.copies().any(|(_, copy)| copy.server == drain.server);
    let mut all = Vec::new();
    for (name, _) in state.disks.iter().filter(|(_, disk)| has(disk)) {
        let done = pool.replace(name, &drain.server, None);
        all.extend(done.map_err(|e| {
            failed(&format!("replace the copies of {name}"), &e)
                .with_more_help("what was replaced stays so; then drain the server again")
        })?);
    }
    say_moved(all, say)
}

fn say_moved(all: Vec<Replaced>, say: &Say) -> Result<(), Failure> {
    let all: Vec<Moved> = all.into_iter().map(Moved::from).collect();
    say.say(&all, |all| {
        let line = |it: &Moved| {
            let Moved { disk, set, from, to, done } = it;
            let when = if *done { "" } else { ", when the disk's owner has filled it" };
            format!("{disk}, part {set}: {to} instead of {from}{when}\n")
        };
        all.iter().map(line).collect()
    })
}

fn failed(what: &str, e: &Error) -> Failure {
    let (code, help) = match e {
        Error::NoPool(_) => (Code::NOT_FOUND, "ferrite pool init makes a pool"),
        Error::NoDisk { .. } => (Code::NOT_FOUND, "ferrite pool list shows the disks"),
        Error::Exists(_) => (Code::FAILED, "choose another name"),
        Error::Room(_) => {
            (Code::FAILED, "start more servers, or choose fewer copies or a smaller size")
        }
        Error::Unsettled(_) => (Code::FAILED, "see whether etcd has a quorum"),
        Error::Busy => (Code::BUSY, "repeat the command"),
        Error::Odd { .. } => (Code::DAMAGED, "see which program has written that key"),
        Error::Etcd(_) => (Code::FAILED, "see whether etcd runs, and whether --etcd names it"),
        Error::Name(_) | Error::Refused(_) => (Code::FAILED, "ferrite pool status shows the pool"),
    };
    Failure::new(format!("cannot {what}"), e, help).with_code(code)
}
