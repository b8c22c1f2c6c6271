//! Disks that come to this host.
//!
//! # Order of durable writes
//! Prepare:
//! 1. The record says that the disk is incoming.
//! 2. The image is made, under a name that ends in `.ferrite-incoming`. Under its own name there is nothing.
//! 3. A tap of this daemon's has it open, and an export gives it to the sender.
//!
//! Take:
//! 1. The export ends, and the tap closes the image: its data and metadata are durable.
//! 2. The maps of changes get the image's own name, and are synced.
//! 3. **The record says that the disk is taken, and is synced: the token is here from now on** (token.rs).
//! 4. The image gets its own name, and the folder is synced.
//! 5. If its guest stays with the sender, it is opened and exported again.
//! 6. The sender is answered.
//!
//! Abort: 1. the record says so, and is synced; 2. export and tap end, and the image is removed.
//!
//! Everything behind a decision is done again until it has worked: [`ensure`].

use std::ffi::OsString;
use std::fs;
use std::io;
use std::net::SocketAddr;
use std::os::unix::fs::DirBuilderExt as _;
use std::os::unix::net::UnixListener;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use ferrite_disk::moved::sync_folder;
use ferrite_host::clock::secret;
use ferrite_keeper::{Exporter, ExporterSpec, Started, TlsFolder};
use rustix::fs::{RenameFlags, renameat_with, statvfs};
use serde::Deserialize;

use super::messages::{Answer, Ask, Base, Prepare, from_hex, is_id, is_name, to_hex};
use super::records::{self, Incoming};
use super::token::{Receiver, Request};
use super::{now_s, wire};
use crate::devices::NotDone;
use crate::exports::{self, Record};
use crate::params::{Format, Image};
use crate::state::DiskId;
use crate::state_files::Stated as _;
use crate::{Failure, Shared, Step, taps, verbs};

/// Most senders at a time.
const MAX_CLIENTS: usize = 16;
/// The largest disk.
const MAX_DISK_BYTES: u64 = 64 << 40;
/// The socket of the process that listens.
const LISTENER: &str = "migration-listener.sock";
/// The pause before the listener is looked for again.
const RETRY: Duration = Duration::from_secs(2);

fn refuse(why: impl Into<String>, help: &str) -> Failure {
    Failure { why: why.into(), help: help.to_owned() }
}

fn not_written(shared: &Shared, e: &io::Error) -> Failure {
    let folder = shared.migration.records.folder().display();
    refuse(
        format!("cannot write a record in {folder}: {e}"),
        "mend that folder (state_folder), and try again",
    )
}

/// Listens for senders, if the configuration says where. It looks after the listener until the daemon ends.
pub(super) fn listen(shared: &Arc<Shared>) {
    let Some(listen) = shared.config.migration.listen else { return };
    let socket = shared.paths.run.join("migration.sock");
    let _ = fs::remove_file(&socket);
    let listener = match UnixListener::bind(&socket) {
        Ok(listener) => listener,
        Err(e) => return tracing::error!("no disk can come here: {}: {e}", socket.display()),
    };
    let accepting = shared.clone();
    let thread = std::thread::Builder::new().name("migrations-in".to_owned());
    if let Err(e) = thread.spawn(move || accept(&accepting, &listener)) {
        return tracing::error!("no disk can come here: no thread: {e}");
    }
    // That of an earlier daemon may have another configuration.
    if let Ok(before) = Exporter::connect(&shared.paths.run.join(LISTENER))
        && let Err(e) = before.end()
    {
        tracing::warn!("the listener for disks that come is the earlier one still: {e}");
    }
    let mut said = None;
    loop {
        match keep_listener(shared, listen, &socket) {
            Ok(()) => said = None,
            Err(e) if said.as_ref() != Some(&e) => {
                tracing::error!("no disk can come here: {e}; trying again");
                said = Some(e);
            }
            Err(_) => {}
        }
        if shared.is_stopped(RETRY) {
            return;
        }
    }
}

/// Starts the process that listens, unless it runs. It outlives the daemon.
fn keep_listener(shared: &Shared, listen: SocketAddr, server: &Path) -> Result<(), Failure> {
    let own = shared.paths.run.join(LISTENER);
    if Exporter::connect(&own).is_ok() {
        return Ok(());
    }
    let spec = ExporterSpec {
        socket: own,
        server: server.to_owned(),
        listen: vec![listen],
        tls: Some(tls(shared)?),
        name: "migration".to_owned(),
        read_only: false,
        hides_names: true,
        root: shared.paths.run.join("empty"),
    };
    let command = shared.serving.exporter(DiskId::tap(0));
    let command =
        command.ok_or_else(|| refuse("this daemon cannot listen", "run ferrite daemon"))?;
    match spec.start(command).map_err(|e| refuse(e.to_string(), "see the daemon's log"))? {
        Started::Listening(at) => {
            tracing::info!("disks may come here, at {listen} ({at:?})");
            Ok(())
        }
        Started::Refused { why, help, .. } => Err(refuse(why, &help)),
    }
}

fn tls(shared: &Shared) -> Result<TlsFolder, Failure> {
    let folder = shared.config.migration.certificates.clone().ok_or_else(super::no_certificates)?;
    Ok(TlsFolder { folder, verifies: true, peers: shared.config.migration.from.clone() })
}

fn accept(shared: &Arc<Shared>, listener: &UnixListener) {
    let clients = Arc::new(AtomicUsize::new(0));
    for stream in listener.incoming() {
        if shared.is_stopped(Duration::ZERO) {
            return;
        }
        let Ok(stream) = stream else {
            std::thread::sleep(Duration::from_millis(50));
            continue;
        };
        // One more is turned away: its connection ends.
        if clients.fetch_add(1, Ordering::Relaxed) >= MAX_CLIENTS {
            clients.fetch_sub(1, Ordering::Relaxed);
            continue;
        }
        let (shared, counted) = (shared.clone(), clients.clone());
        let thread = std::thread::Builder::new().name("migration".to_owned());
        let served = thread.spawn(move || {
            if let Err(e) = wire::serve(stream, |ask| answer(&shared, ask)) {
                tracing::debug!("a sender of a disk has gone: {e}");
            }
            counted.fetch_sub(1, Ordering::Relaxed);
        });
        if served.is_err() {
            clients.fetch_sub(1, Ordering::Relaxed);
        }
    }
}

/// Does what a sender asks for.
fn answer(shared: &Arc<Shared>, ask: Ask) -> Answer {
    // One at a time: two requests of one migration must not meet.
    let _one = shared.migration.change_in();
    let done = match ask {
        Ask::Hello { .. } => Err(refuse("the version is known already", "ask for something else")),
        Ask::Prepare(asked) => prepare(shared, &asked),
        Ask::Take { id, keep, maps } => take(shared, &id, keep, maps.as_deref()),
        Ask::Abort { id } => abort(shared, &id),
        Ask::Look { id } => known(shared, &id)
            .map(|known| Answer::State { state: known.map(|known| known.state), note: None }),
    };
    done.unwrap_or_else(|failure| {
        tracing::warn!("a disk that comes: {failure}");
        failure.into()
    })
}

fn known(shared: &Shared, id: &str) -> Result<Option<Incoming>, Failure> {
    if !is_id(id) {
        return Err(refuse("that is no identifier of a migration", "begin it anew"));
    }
    let folder = shared.migration.records.folder().display().to_string();
    shared.migration.records.read(id).map_err(|e| {
        let help = "repair that file: it says which of two hosts has the disk";
        refuse(format!("cannot read the record of the migration in {folder}: {e}"), help)
    })
}

fn write(shared: &Shared, record: &Incoming) -> Result<(), Failure> {
    shared.migration.records.write(record).map_err(|e| not_written(shared, &e))
}

fn prepare(shared: &Arc<Shared>, asked: &Prepare) -> Result<Answer, Failure> {
    let Some(folder) = shared.config.migration.folder.clone() else {
        let help = "set folder below [migration] in its ferrite.toml, and restart that daemon";
        return Err(refuse("this host has no folder for disks that come", help));
    };
    let path = folder.join(&asked.name);
    let record = match known(shared, &asked.id)? {
        Some(record) if record.state == Receiver::Incoming && record.path == path => record,
        Some(_) => return Err(refuse("the migration is over here", "begin it anew")),
        None => {
            may_come(shared, asked, &folder)?;
            let mut record = Incoming::new(&asked.id, asked.format, &path, asked.bytes, now_s());
            record.base = asked.base.as_ref().map(|base| folder.join(&base.name));
            record.is_file = asked.is_file;
            let random = secret::<16>().map_err(|e| refuse(e.to_string(), "try again"))?;
            record.export = format!("migration-{}", to_hex(&random));
            write(shared, &record)?;
            (shared.on_step)(Step::Migration("noted"));
            record
        }
    };
    let record = ensure(shared, record).inspect_err(|_| give_up_unmade(shared, &asked.id))?;
    (shared.on_step)(Step::Migration("prepared"));
    Ok(Answer::Prepared { port: record.port, export: record.export })
}

/// Removes what a migration has that has not begun.
fn give_up_unmade(shared: &Shared, id: &str) {
    if let Ok(Some(record)) = known(shared, id) {
        clean(shared, &record);
        if let Err(e) = shared.migration.records.remove::<Incoming>(id) {
            tracing::warn!("the record of migration {id} stays: {e}");
        }
    }
}

/// Whether a disk may come.
fn may_come(shared: &Shared, asked: &Prepare, folder: &Path) -> Result<(), Failure> {
    // A migration that was aborted may be aborted again.
    let is_aborted = |of: &Incoming| (of.state == Receiver::Aborted).then_some(of.created);
    shared.migration.records.prune::<Incoming>(now_s(), is_aborted);
    let records: Vec<Incoming> = shared.migration.records.all();
    if records.len() >= records::MAX {
        let help = "remove old ones there: ferrite migrate list, ferrite migrate forget";
        return Err(refuse("this host has too many records of migrations", help));
    }
    if !is_name(&asked.name) {
        let help = "name the image for the other host: ferrite migrate --name NAME, of letters, digits, and . _ - + @";
        return Err(refuse(
            format!("{:.100?} cannot be the name of an image there", asked.name),
            help,
        ));
    }
    if !matches!(asked.format, Format::Raw | Format::Vhd | Format::Qcow2) {
        return Err(refuse("only raw, vhd and qcow2 images can come", "convert it first"));
    }
    if asked.bytes == 0 || asked.bytes > MAX_DISK_BYTES || !asked.bytes.is_multiple_of(512) {
        let why = format!("a disk of {} bytes cannot come", asked.bytes);
        return Err(refuse(why, "512 bytes to 64 TiB, in sectors, are possible"));
    }
    if let Some(base) = &asked.base {
        may_be_base(shared, asked, base)?;
    }
    let path = folder.join(&asked.name);
    let is_taken = |path: &Path| path.symlink_metadata().is_ok();
    let coming = Incoming::new(&asked.id, asked.format, &path, 0, 0).coming();
    let of_other = |other: &Incoming| other.state == Receiver::Incoming && other.path == path;
    if is_taken(&path) || is_taken(&coming.path) || records.iter().any(of_other) {
        let why = format!("there is an image {} on that host", path.display());
        return Err(refuse(why, "give it another name there (--name NAME), or remove that one"));
    }
    let space = statvfs(folder).map_err(|e| {
        let why = format!("the folder {} cannot be used: {e}", folder.display());
        refuse(why, "make it on that host, or correct folder below [migration]")
    })?;
    let free = space.f_bavail.saturating_mul(space.f_frsize);
    match asked.allocated <= free {
        true => Ok(()),
        false => {
            let why = format!(
                "{} has {} MiB free, and the image takes {} MiB",
                folder.display(),
                free >> 20,
                asked.allocated >> 20
            );
            Err(refuse(why, "make room there, or name a folder on a larger file system"))
        }
    }
}

/// Whether an image that comes may stand on this one: its sender can read that.
///
/// An image that came here as a parent has a sender that knows it: its identifier is a secret of both hosts.
fn may_be_base(shared: &Shared, asked: &Prepare, base: &Base) -> Result<(), Failure> {
    let Base { name, id } = base;
    let has_come = match id {
        None => false,
        Some(id) => known(shared, id)?.is_some_and(|it| {
            let is_it = it.path.file_name().is_some_and(|file| file == name.as_str());
            it.is_file && it.state == Receiver::Taken && is_it
        }),
    };
    if !has_come && !shared.config.migration.bases.iter().any(|known| known == name) {
        let help = "add it to bases below [migration] in its ferrite.toml, and restart that daemon; or leave --base out";
        return Err(refuse(format!("{name:.100?} is not one of that host's bases"), help));
    }
    match asked.format {
        Format::Vhd | Format::Qcow2 => Ok(()),
        other => {
            let why = format!("an image that is {} stands on no other one", other.word());
            Err(refuse(why, "leave --base out"))
        }
    }
}

/// Does all that follows from a record, as far as it was not done.
pub(super) fn ensure(shared: &Arc<Shared>, mut record: Incoming) -> Result<Incoming, Failure> {
    match record.state {
        Receiver::Aborted => clean(shared, &record),
        Receiver::Incoming => {
            let image = record.coming();
            if !record.made {
                make(shared, &record, &image)?;
                record.made = true;
                write(shared, &record)?;
                (shared.on_step)(Step::Migration("made"));
            }
            give(shared, &mut record, &image)?;
        }
        Receiver::Taken => {
            let (coming, own) = (record.coming(), record.image());
            if !record.named {
                close(shared, &coming)?;
                name(&coming, &own)?;
                (shared.on_step)(Step::Migration("named"));
                record.named = true;
                write(shared, &record)?;
            }
            if record.keep {
                give(shared, &mut record, &own)?;
            }
        }
    }
    Ok(record)
}

/// Makes the image of an incoming disk. The file of an earlier attempt is removed: the sender has never written to it.
fn make(shared: &Shared, record: &Incoming, image: &Image) -> Result<(), Failure> {
    match fs::remove_file(&image.path) {
        Err(e) if e.kind() != io::ErrorKind::NotFound => {
            let why = format!("cannot remove {}: {e}", image.path.display());
            return Err(refuse(why, "remove it by hand"));
        }
        _ => {}
    }
    match record.base.as_ref().filter(|_| !record.is_file) {
        None => {
            verbs::run(shared, &["create".into(), image.name(), record.bytes.to_string().into()])?;
        }
        Some(base) => {
            verbs::run(shared, &["clone".into(), base_name(shared, base), image.name()])?;
            // Never smaller: that is refused.
            let bytes = record.bytes.to_string();
            verbs::run(shared, &["resize".into(), image.name(), bytes.into()])?;
        }
    }
    sync_folder(&image.path).map_err(|e| refuse(e.to_string(), "check the storage of that folder"))
}

/// The name of an image for `ferrite image`: with its format, if it came here.
fn base_name(shared: &Shared, base: &Path) -> OsString {
    let records = shared.migration.records.all::<Incoming>();
    let of = records.iter().find(|it| it.state == Receiver::Taken && it.path == base);
    of.map_or_else(|| base.into(), |it| it.image().name())
}

/// What `ferrite image info` says of a chain.
#[derive(Deserialize)]
struct Facts {
    chain: Vec<serde::de::IgnoredAny>,
}

/// Names the parent in the image of a file that has come. The sender must not choose which file of this host that is.
fn name_parent(shared: &Shared, record: &Incoming) -> Result<(), Failure> {
    let image = Image { format: record.format, path: record.coming().path };
    if let Some(base) = &record.base {
        let base = base_name(shared, base);
        let arguments = ["rebase".into(), "-u".into(), image.name(), "-b".into(), base];
        return verbs::run(shared, &arguments);
    }
    let said = verbs::asked(shared, &["info".into(), image.name()])?;
    match serde_json::from_slice::<Facts>(&said) {
        Ok(facts) if facts.chain.len() == 1 => Ok(()),
        _ => Err(refuse("the image that has come has a parent", "send that one first (--chain)")),
    }
}

/// The tap that has this image open.
fn tap_of(shared: &Shared, image: &Image) -> Option<DiskId> {
    shared.table.read(|disks| {
        let is_it = |(id, entry): &(&DiskId, &crate::table::Entry)| {
            id.is_tap() && entry.image.as_ref() == Some(image)
        };
        disks.iter().find(is_it).map(|(id, _)| *id)
    })
}

/// Opens the image, and gives it to the sender, if neither was done.
fn give(shared: &Arc<Shared>, record: &mut Incoming, image: &Image) -> Result<(), Failure> {
    let disk = match tap_of(shared, image) {
        Some(disk) => disk,
        None => {
            let minor = taps::open_own(shared, image, false).map_err(|e| e.failure)?;
            (shared.on_step)(Step::Migration("opened"));
            DiskId::tap(minor)
        }
    };
    if exports::list(shared).iter().any(|(known, _, _)| known.disk == disk) {
        return Ok(());
    }
    let ip = shared.config.migration.listen.map(|at| at.ip());
    let ip = ip.ok_or_else(|| {
        refuse("this host does not listen for disks", "set listen below [migration]")
    })?;
    let (first, last) = shared.config.migration.ports;
    let ports: Vec<u16> = match record.port {
        0 => (first..=last).collect(),
        port => vec![port],
    };
    let mut refused = refuse("no port is named", "set ports below [migration]");
    for port in ports {
        let wanted = Record {
            version: Record::VERSION,
            disk,
            listen: vec![SocketAddr::new(ip, port)],
            tls: shared.config.migration.certificates.clone(),
            any_client: false,
            peers: shared.config.migration.from.clone(),
            name: record.export.clone(),
            read_only: false,
            shared: false,
            no_list: true,
        };
        match exports::add(shared, wanted) {
            Ok(made) => {
                record.port = made.listen.first().map_or(port, SocketAddr::port);
                return write(shared, record);
            }
            Err(NotDone::InUse(e)) => refused = e,
            Err(NotDone::Missing(e) | NotDone::Failed(e)) => return Err(e),
        }
    }
    Err(refused)
}

/// Ends the export of an image, and closes it: it is complete and durable then.
fn close(shared: &Shared, image: &Image) -> Result<(), Failure> {
    let Some(disk) = tap_of(shared, image) else { return Ok(()) };
    match exports::remove(shared, disk) {
        Ok(_) | Err(NotDone::Missing(_)) => {}
        Err(NotDone::InUse(e) | NotDone::Failed(e)) => return Err(e),
    }
    if let Some(minor) = disk.minor_of_tap() {
        taps::close_own(shared, minor);
    }
    match tap_of(shared, image) {
        None => Ok(()),
        Some(_) => {
            let why = format!("{} cannot be closed yet", image.path.display());
            Err(refuse(why, "it is tried again; look at the storage of that folder"))
        }
    }
}

/// Gives the image its own name, durably. It may have it already.
fn name(coming: &Image, own: &Image) -> Result<(), Failure> {
    let at = rustix::fs::CWD;
    match renameat_with(at, &coming.path, at, &own.path, RenameFlags::NOREPLACE) {
        Ok(()) => {}
        Err(rustix::io::Errno::NOENT) if own.path.exists() => {}
        Err(e) => {
            let why = format!("{} cannot get its name: {e}", coming.path.display());
            return Err(refuse(why, "see what has that name; it is tried again"));
        }
    }
    sync_folder(&own.path).map_err(|e| refuse(e.to_string(), "check the storage of that folder"))
}

fn take(shared: &Arc<Shared>, id: &str, keep: bool, maps: Option<&str>) -> Result<Answer, Failure> {
    let Some(mut record) = known(shared, id)? else {
        return Ok(Answer::State { state: None, note: None });
    };
    let mut note = None;
    if let (Receiver::Incoming, Some(after)) =
        (record.state, Receiver::after(Some(record.state), Request::Take))
    {
        if !record.made {
            return Err(refuse("the image was not made", "abort the migration"));
        }
        close(shared, &record.coming())?;
        (shared.on_step)(Step::Migration("closed"));
        if record.is_file {
            name_parent(shared, &record)?;
        }
        note = maps.and_then(|maps| adopt(shared, &record, maps).err()).map(|e| {
            tracing::warn!("the dirty maps of {} do not come along: {e}", record.path.display());
            format!("the dirty maps do not come along: {e}; make a full backup there")
        });
        record.state = after;
        record.keep = keep;
        write(shared, &record)?;
        (shared.on_step)(Step::Migration("taken"));
    }
    if record.state == Receiver::Taken {
        record = ensure(shared, record)?;
        (shared.on_step)(Step::Migration("answering"));
        tracing::info!("the disk of migration {id} is here: {}", record.path.display());
    }
    Ok(Answer::State { state: Some(record.state), note })
}

/// Gives the image the maps of changes that the sender has.
fn adopt(shared: &Shared, record: &Incoming, maps: &str) -> Result<(), Failure> {
    let bytes = from_hex(maps).ok_or_else(|| refuse("they are not understood", "-"))?;
    let folder = shared.paths.run.join("mirrors");
    let failed = |e: io::Error| refuse(format!("{}: {e}", folder.display()), "make room in /run");
    fs::DirBuilder::new().recursive(true).mode(0o700).create(&folder).map_err(failed)?;
    let file = folder.join(format!("{}.maps", record.id));
    fs::write(&file, bytes).map_err(failed)?;
    let own: OsString = record.path.clone().into();
    let adopted = verbs::run(
        shared,
        &["dirty".into(), "adopt".into(), file.clone().into(), record.coming().name(), own],
    );
    let _ = fs::remove_file(&file);
    adopted
}

fn abort(shared: &Arc<Shared>, id: &str) -> Result<Answer, Failure> {
    let known = known(shared, id)?;
    let after = Receiver::after(known.as_ref().map(|known| known.state), Request::Abort);
    let mut record = known.unwrap_or_else(|| Incoming::unknown(id, now_s()));
    if let Some(after) = after {
        record.state = after;
        write(shared, &record)?;
        (shared.on_step)(Step::Migration("aborted"));
    }
    if record.state == Receiver::Aborted {
        clean(shared, &record);
    }
    Ok(Answer::State { state: Some(record.state), note: None })
}

/// Removes what an aborted migration has. A failure is logged: nothing depends on it.
fn clean(shared: &Shared, record: &Incoming) {
    if record.path.as_os_str().is_empty() {
        return;
    }
    let coming = record.coming();
    if let Err(e) = close(shared, &coming) {
        return tracing::warn!("what came of migration {} is not removed: {e}", record.id);
    }
    let maps = verbs::maps_of(&record.path);
    for path in [&coming.path, &maps] {
        // The maps are another image's if that has the name.
        if *path == maps && record.path.exists() {
            continue;
        }
        if let Err(e) = fs::remove_file(path)
            && e.kind() != io::ErrorKind::NotFound
        {
            tracing::warn!("cannot remove {}: {e}", path.display());
        }
    }
}

/// Ends the export of a disk that has arrived, by which the sender's guest uses it.
pub(super) fn end(shared: &Shared, record: &Incoming) -> Result<(), Failure> {
    close(shared, &record.image())
}

/// Records an administrator's decision on a disk that comes.
pub(super) fn resolve(shared: &Arc<Shared>, id: &str, here: bool) -> Result<Incoming, Failure> {
    let _one = shared.migration.change_in();
    let mut record = known(shared, id)?.ok_or_else(|| super::no_such(id))?;
    record.state = record.state.decide(here).ok_or_else(|| {
        let has = if record.state == Receiver::Taken {
            "this host has the disk"
        } else {
            "it was given up"
        };
        refuse(format!("it is not in doubt: {has}"), "ferrite migrate list shows it")
    })?;
    if here {
        close(shared, &record.coming())?;
    }
    write(shared, &record)?;
    ensure(shared, record)
}
