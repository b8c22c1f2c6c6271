//! `ferrite pool add-lun` and `remove-lun`: LUNs in place of servers.

use std::path::Path;

use ferrite_host::fence::{self, Terms};
use ferrite_member::{Fault, LunName, NewLun, clear, prepare};
use ferrite_pool_map::{Access, Error, Id, Lun, RANGE_UNIT};
use rustix::io::Errno;

use super::args::{AddLunArgs, RemoveLunArgs};
use super::{failed, settings};
use crate::exit::{Code, Failure};

/// Why a LUN is not taken.
enum Cause {
    Map(Error),
    Lun(Fault),
}

impl From<Fault> for Cause {
    fn from(fault: Fault) -> Cause {
        Cause::Lun(fault)
    }
}

/// Takes a LUN into the pool.
pub(super) fn add(pool: &Access, args: &AddLunArgs) -> Result<(), Failure> {
    let what = format!("take the LUN {}", args.device.display());
    let of_map = |e: Error| failed(&what, &e);
    let device = std::path::absolute(&args.device).unwrap_or_else(|_| args.device.clone());
    let wwid = fence::name(&device).map_err(|why| {
        let help = "name the LUN itself, or multipath's device of it, as root";
        Failure::new(format!("cannot {what}"), why, help)
    })?;
    let found = pool.state().map_err(of_map)?;
    let name = LunName {
        pool: found.pool.id.0,
        server: args.name.clone(),
        id: Id::random().0,
        wwid: wwid.clone(),
        device: device.clone(),
    };
    let lun = |new: &NewLun| Lun {
        id: Id(name.id),
        wwid: wwid.clone(),
        device: device.clone(),
        array: args.array.clone(),
        bytes: new.bytes,
        used: RANGE_UNIT,
        weak: args.weak,
        disk: None,
    };
    let terms = Terms { weak: args.weak, records: settings::fences() };
    let prepared = prepare(
        &name,
        &terms,
        args.erase,
        |new| pool.may_add_lun(&args.name, &lun(new)).map_err(Cause::Map),
        |new| pool.add_lun(&args.name, &lun(new)).map_err(Cause::Map),
    );
    prepared.map_err(|cause| match cause {
        Cause::Map(e) => of_map(e),
        Cause::Lun(fault) => of_lun(&what, &fault),
    })
}

/// Takes a LUN out of the pool, and its header if this host has it.
pub(super) fn remove(pool: &Access, args: &RemoveLunArgs) -> Result<(), Failure> {
    let what = format!("take the LUN {} out of the pool", args.name);
    let id = pool.state().map_err(|e| failed(&what, &e))?.pool.id;
    let Lun { id: lun, wwid, device, weak, .. } =
        pool.remove_lun(&args.name).map_err(|e| failed(&what, &e))?;
    let at = fence::find(&wwid, &device).unwrap_or_else(|| device.clone());
    let name = LunName { pool: id.0, server: args.name.clone(), id: lun.0, wwid, device };
    let cleared = clear(&name, Terms { weak, records: settings::fences() });
    match cleared {
        Ok(()) => println!("{}", stays(&at)),
        // It is out of the pool.
        Err(fault) => println!("its header stays: {fault}; add-lun takes it with --erase"),
    }
    Ok(())
}

fn stays(device: &Path) -> String {
    let shown = device.display();
    format!(
        "it stays reserved for this host, against owners that were shut out; when all have ended: ferrite fence release {shown}"
    )
}

fn of_lun(what: &str, fault: &Fault) -> Failure {
    let code = if fault.errno == Errno::BUSY { Code::BUSY } else { Code::FAILED };
    Failure::new(format!("cannot {what}"), format!("{}: {}", fault.what, fault.why), &fault.help)
        .with_code(code)
}
