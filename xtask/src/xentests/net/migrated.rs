//! A guest becomes another domain, and its interface goes with it: it reboots, or migrates to its own host.

use super::{Bench, Kind, Peer, with_network};
use crate::xentests::guests::has_migrated;
use crate::xentests::toolstack::xl_knows_us;
use anyhow::{Context as _, Result};
use ferrite_xenhost::guest::{Follow, GuestOptions};
use ferrite_xenhost::network;
use ferrite_xenhost::steps::say;

pub(super) fn migrates(bench: &mut Bench<'_>) -> Result<()> {
    with_network(bench, "", |bench, _| steps(bench))
}

/// xl starts a guest again if it has a disk; the disk is the daemon's.
pub(super) fn reboots(bench: &mut Bench<'_>) -> Result<()> {
    if !xl_knows_us(bench)? {
        return Ok(());
    }
    bench.start_daemon()?;
    with_network(bench, "", |bench, _| {
        let image = bench.image(64)?;
        let (guest, mut disk) = bench.guest_of_xl(&GuestOptions::default(), &image)?;
        let mut first = Peer::of(bench, guest, 1)?;
        let mut other = Peer::start(bench, Kind::Pv, 2)?;
        other.ping(bench, &first, &[56, 8000]).context("before")?;
        say("  reboot");
        // It does not answer this command.
        let _gone = first.guest.begin(bench.xenhost, "sync; reboot -f", 60)?;
        bench.follow(&mut first.guest, &mut disk, Follow::Booted)?;
        first.sh(bench, network::LOAD, 60)?;
        first.up(bench)?;
        other.ping(bench, &first, &[56, 8000, 65_507]).context("after")
    })
}

fn steps(bench: &mut Bench<'_>) -> Result<()> {
    let mut mover = Peer::start(bench, Kind::Pvh, 1)?;
    let mut other = Peer::start(bench, Kind::Pvh, 2)?;
    other.ping(bench, &mover, &[56, 8000]).context("before")?;
    for time in 1..=2 {
        say(format!("  migration {time}"));
        let (name, old) = (mover.guest.name().to_owned(), mover.guest.domid());
        let migrate =
            format!("xl migrate -s '' {name} 'xl migrate-receive' 2>&1 | grep -v progress");
        has_migrated(&bench.xenhost.sh_for(&migrate, 600)?)?;
        mover.guest.follow(bench.xenhost, Follow::Migrated)?;
        bench.forget(&mover.guest);
        bench.guests.push(mover.guest.clone());
        let gone = format!("! xenstore-exists /local/domain/0/backend/vif/{old}/0/frontend");
        bench.xenhost.wait_until("the old interface gone", &gone, 60)?;
        other.ping(bench, &mover, &[56, 8000, 65_507]).context("to the guest that migrated")?;
        mover.ping(bench, &other, &[56, 65_507]).context("from the guest that migrated")?;
    }
    Ok(())
}
