//! The exclusive lock of an image. The cluster takes writes only from the client that has it.
//!
//! * A dead helper of this host has left it: it is broken at once. To break a lock shuts the old client out of the cluster, so
//!   none of its writes comes late.
//! * Its owner has not been heard of for 30 s (it watches the image no more): it is broken likewise, as librbd itself does.
//! * Any other owner may be alive: the image is refused, until an administrator takes it by hand.

use ferrite_helper::{Fault, Record, State};

use crate::ffi::Image;
use crate::log::log;
use crate::open::{PERMISSION, reason};

const ESHUTDOWN: i32 = 108;
const EROFS: i32 = 30;

/// Whether an error says that the image is another client's now.
pub(crate) fn is_lost(errno: i32) -> bool {
    matches!(errno, ESHUTDOWN | EROFS)
}

/// Takes the lock for the client `own`, whose record this is. `name` is the image's for people, `shown` as commands take it.
pub(crate) fn take(
    image: &Image<'_>,
    own: &str,
    record: &Record,
    (name, shown): (&str, &str),
) -> Result<(), Fault> {
    let owner = image.owner().map_err(|e| cannot("learn who has the lock of", name, e))?;
    if record.has_lost(owner.as_deref()) {
        let why = format!("{name} was taken by another client while this disk had it");
        let help = "end the guest here: what it has in memory is no longer what the disk has; then attach it anew";
        return Err(Fault::lasting(why, help));
    }
    if let Some(owner) = owner {
        let is_dead = record.is_predecessor(&owner) || is_silent(image, &owner, name)?;
        if !is_dead {
            let why = format!("{name} is in use: the client {owner} has its lock");
            let help = format!(
                "end its user there; if that host is gone, take it: ferrite-rbd steal '{shown}'"
            );
            return Err(Fault::passing(why, help));
        }
        log(4, &format!("{name}: the lock of {owner}, which has ended, is broken"));
        image.break_lock(&owner).map_err(|e| cannot("break the lock of", name, e))?;
    }
    // The record before the lock: a successor has to know whose it is. Both before the first write.
    record.write(own, State::Holds).map_err(|e| {
        let why = format!("the record of the lock of {name} cannot be written: {e}");
        Fault::passing(why, "make room in /run")
    })?;
    image.lock().map_err(|e| match e {
        EROFS => Fault::passing(
            format!("{name} is in use: another client has its lock and keeps it"),
            format!("end its user there, or take it: ferrite-rbd steal '{shown}'"),
        ),
        e => cannot("lock", name, e),
    })
}

/// Whether the owner has not been heard of for so long that the cluster has forgotten it.
fn is_silent(image: &Image<'_>, owner: &str, name: &str) -> Result<bool, Fault> {
    let watchers = image.watchers().map_err(|e| cannot("list the users of", name, e))?;
    Ok(!watchers.iter().any(|watcher| watcher == owner))
}

pub(crate) fn cannot(what: &str, name: &str, errno: i32) -> Fault {
    Fault::passing(format!("cannot {what} {name}: {}", reason(errno)), PERMISSION)
}
