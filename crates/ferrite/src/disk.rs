//! `ferrite disk`: asks the daemon, and shows its answers.

use std::path::Path;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use ferrite_daemon::Paths;
use ferrite_daemon::control::client::{self, ClientError};
use ferrite_daemon::control::protocol::{
    DetachParams, Detached, Details, Disk, Disks, Full, Hangs, Job, JobList, Nothing, PhaseName,
    Setting, ShowParams, Source, UpgradeParams, Upgraded,
};
use ferrite_daemon::state::DiskId;
use ferrite_xen::hypervisor::DomId;
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::Value;

use crate::cli::{DiskArgs, DiskCommand, UpgradeArgs};
use crate::exit::{Code, Failure};
use crate::guests::Names;
use crate::job;
use crate::plain::one_line;
use crate::vdev::Vbd;

pub(crate) mod attach;
pub(crate) mod change;
pub(crate) mod device;
pub(crate) mod dirty;
pub(crate) mod export;
pub(crate) mod limit;
pub(crate) mod pause;
pub(crate) mod wait;

/// Time for the daemon's answer, besides the time that the method itself may take.
pub(crate) const ANSWER: Duration = Duration::from_secs(40);
/// Time for upgrading all disks of a host, one after the other. Most take far less than a second.
const UPGRADE: Duration = Duration::from_secs(3600);
/// Time for detaching: the daemon waits as long for the image to be closed.
const DETACH: Duration = Duration::from_secs(320);

pub(crate) fn run(args: &DiskArgs) -> Result<(), Failure> {
    match &args.command {
        DiskCommand::List { json, places } => list(&places.run_dir, *json),
        DiskCommand::Attach(args) => attach::run(args),
        DiskCommand::Limit(args) => limit::run(args),
        DiskCommand::Set(args) => limit::set(args),
        DiskCommand::Coalesce(args) => job::coalesce(args),
        DiskCommand::Show { disk, json, places } => show(&places.run_dir, disk.disk.find()?, *json),
        DiskCommand::Detach { disk, force, timeout, json, places } => {
            let disk = disk.disk.find()?;
            let asked = DetachParams { disk: id(disk), force: *force, timeout_s: *timeout };
            let wait = DETACH + seconds(*timeout);
            let done: Detached = call(&places.run_dir, "disk.detach", &asked, wait)
                .map_err(|e| of_disk("cannot detach disk", disk, &e))?;
            let how = if done.forced { "was taken from its guest" } else { "is detached" };
            tell(*json, &done, || println!("disk {disk} {how}"))
        }
        DiskCommand::Device(args) => device::device(args),
        DiskCommand::Devices(args) => device::devices(args),
        DiskCommand::Export(args) => export::export(args),
        DiskCommand::Unexport(args) => export::unexport(args),
        DiskCommand::Exports(args) => export::exports(args),
        DiskCommand::Pause(args) => pause::pause(args),
        DiskCommand::Resume(args) => pause::resume(args),
        DiskCommand::Snapshot(args) => change::snapshot(args),
        DiskCommand::Dirty(command) => dirty::run(command),
        DiskCommand::Resize(args) => change::resize(args),
        DiskCommand::Switch(args) => change::switch(args),
        DiskCommand::Wait(args) => wait::wait(args),
    }
}

/// `ferrite upgrade`.
pub(crate) fn upgrade(args: &UpgradeArgs) -> Result<(), Failure> {
    let binary = match &args.binary {
        Some(binary) => std::path::absolute(binary),
        None => std::env::current_exe(),
    };
    let binary = binary.ok().and_then(|path| path.into_os_string().into_string().ok());
    let binary = binary.ok_or_else(|| {
        let help = "name it with --binary";
        Failure::new("cannot tell which program to use", "its name is not known", help)
    })?;
    let disk = args.disk.as_ref().map(|disk| disk.find()).transpose()?;
    let asked = UpgradeParams { binary, disk: disk.map(id) };
    let done: Upgraded =
        call(&args.places.run_dir, "upgrade", &asked, UPGRADE).map_err(|e| match disk {
            Some(disk) => of_disk("cannot upgrade disk", disk, &e),
            None => not_answered("cannot upgrade disks", &e, e.to_string()),
        })?;
    tell(args.json, &done, || print!("{}", upgraded(&done, &asked.binary)))?;
    export::say_which_are_old(&args.places.run_dir, disk.map(id), Path::new(&asked.binary));
    let Some(first) = done.failed.first() else { return Ok(()) };
    for disk in &done.failed {
        eprintln!("disk {}: {}; {}", disk.disk, one_line(&disk.why), one_line(&disk.help));
    }
    let what = format!("{} not served by {}", are(done.failed.len()), one_line(&asked.binary));
    Err(Failure::new(what, &first.why, first.help.clone()))
}

/// The result of an upgrade, without its failures.
fn upgraded(done: &Upgraded, binary: &str) -> String {
    match (done.upgraded.len(), done.failed.len()) {
        (0, 0) => "no disk is served\n".to_owned(),
        (0, _) => String::new(),
        (some, _) => format!("{} served by {}\n", are(some), one_line(binary)),
    }
}

/// The number of disks, with its verb.
fn are(disks: usize) -> String {
    match disks {
        1 => "1 disk is".to_owned(),
        _ => format!("{disks} disks are"),
    }
}

fn seconds(seconds: u32) -> Duration {
    Duration::from_secs(seconds.into())
}

pub(crate) fn id(disk: Vbd) -> DiskId {
    DiskId { domid: disk.domain.0, devid: disk.device }
}

pub(crate) fn vbd(id: DiskId) -> Vbd {
    Vbd { domain: DomId(id.domid), device: id.devid }
}

fn places(run: &Path) -> Paths {
    Paths { run: run.to_owned() }
}

pub(crate) fn call<T: DeserializeOwned>(
    run: &Path,
    method: &str,
    params: &impl Serialize,
    timeout: Duration,
) -> Result<T, ClientError> {
    client::call(&places(run).control(), method, params, timeout)
}

/// The failure of an operation on a disk.
pub(crate) fn of_disk(what: &str, disk: Vbd, e: &ClientError) -> Failure {
    not_answered(&format!("{what} {disk}"), e, why(disk, e))
}

/// The reason. It names the disk, since a script's log may have nothing else.
fn why(disk: Vbd, e: &ClientError) -> String {
    let why = e.to_string();
    why.strip_prefix(&format!("disk {disk} ")).map_or(why.clone(), |rest| format!("it {rest}"))
}

pub(crate) fn not_answered(what: &str, e: &ClientError, why: String) -> Failure {
    let failure = Failure::new(what, why, e.help());
    match (e.is_no_disk(), e.is_in_use()) {
        (true, _) => failure.with_code(Code::NOT_FOUND),
        (_, true) => failure.with_code(Code::BUSY),
        _ => failure,
    }
}

/// Prints the answer, as JSON or for people.
pub(crate) fn tell(
    json: bool,
    answer: &impl Serialize,
    text: impl FnOnce(),
) -> Result<(), Failure> {
    if !json {
        text();
        return Ok(());
    }
    let text = serde_json::to_string_pretty(answer)
        .map_err(|e| Failure::new("cannot print JSON", e, "leave --json out"))?;
    println!("{text}");
    Ok(())
}

fn list(run: &Path, json: bool) -> Result<(), Failure> {
    let what = "cannot list the disks";
    let disks: Disks = call(run, "disk.list", &Nothing {}, ANSWER)
        .map_err(|e| not_answered(what, &e, e.to_string()))?;
    // An older daemon has none.
    let jobs = call(run, "job.list", &Nothing {}, ANSWER).map(|list: JobList| list.jobs);
    let mut jobs = jobs.unwrap_or_default();
    jobs.retain(|job| !job.phase.has_ended());
    let names = Names::read();
    let mut value = serde_json::to_value(&disks).unwrap_or_default();
    for (value, disk) in value["disks"].as_array_mut().into_iter().flatten().zip(&disks.disks) {
        add_name(value, disk, &names);
        if let (Some(fields), Some(job)) = (value.as_object_mut(), job_of(&jobs, disk)) {
            fields.insert("job".to_owned(), serde_json::to_value(job).unwrap_or_default());
        }
    }
    tell(json, &value, || print!("{}", table(&disks.disks, &jobs, &names)))?;
    // Programs would take an empty list for a host without disks.
    match disks.no_xen {
        None => Ok(()),
        Some(why) => {
            let help =
                "what is listed is what was attached before; ferrite doctor shows what is missing";
            Err(Failure::new(
                "cannot tell which disks are attached",
                format!("no Xen: {why}"),
                help,
            ))
        }
    }
}

/// Adds the disk's name to the daemon's answer, which has only its numbers.
fn add_name(value: &mut Value, disk: &Disk, names: &Names) {
    if let Some(fields) = value.as_object_mut() {
        fields.insert("name".to_owned(), names.disk(vbd(disk.disk)).into());
    }
}

/// The job that works on a disk.
fn job_of<'a>(jobs: &'a [Job], disk: &Disk) -> Option<&'a Job> {
    jobs.iter().find(|job| job.disk == disk.disk)
}

/// Said of each disk with `fence = "weak-reservation"`, each time.
const WEAK: &str =
    "WEAK: its LUN's target forgets reservations; two hosts may write when it has started again";

/// One line per disk, one for its job, and one for the reason if it has failed.
fn table(disks: &[Disk], jobs: &[Job], names: &Names) -> String {
    let titles = ["DISK", "NAME", "PHASE", "FOR", "PID", "FORMAT", "IMAGE"];
    let mut rows = vec![titles.map(str::to_owned)];
    for disk in disks {
        rows.push([
            disk.disk.to_string(),
            names.disk(vbd(disk.disk)),
            phase(disk.phase).to_owned(),
            age(disk.since),
            disk.pid.map_or_else(|| "-".to_owned(), |pid| pid.to_string()),
            disk.format.map_or("-", |format| format.word()).to_owned(),
            one_line(disk.image.as_deref().unwrap_or("-")).into_owned(),
        ]);
    }
    let width = |column: usize| rows.iter().map(|row| row[column].chars().count()).max();
    let widths: Vec<usize> = (0..6).map(|column| width(column).unwrap_or(0)).collect();
    let mut text = String::new();
    for (i, row) in rows.iter().enumerate() {
        for (cell, width) in row.iter().zip(&widths) {
            text += &format!("{cell:width$}  ");
        }
        text += &format!("{}\n", row[6]);
        let Some(disk) = i.checked_sub(1).map(|at| &disks[at]) else { continue };
        let paused = disk.paused.as_ref().map(|paused| pause::note(disk, paused));
        let job = job_of(jobs, disk).map(job::note);
        let hangs = disk.hangs.as_ref().map(hanging);
        let weak = disk.weak.then(|| WEAK.to_owned());
        let notes = [disk.full.as_ref().map(space), hangs, weak, paused, job, disk.why.clone()];
        for note in notes.iter().flatten() {
            text += &format!("    {}\n", one_line(note));
        }
    }
    text
}

fn space(full: &Full) -> String {
    let what = if full.requests == 1 { "request waits" } else { "requests wait" };
    format!("its storage is full: {} {what} for space, for {}", full.requests, age(full.since))
}

fn hanging(hangs: &Hangs) -> String {
    let what = if hangs.requests == 1 { "request waits" } else { "requests wait" };
    format!("its storage does not answer: {} {what}, for {}", hangs.requests, age(hangs.since))
}

fn phase(phase: PhaseName) -> &'static str {
    match phase {
        PhaseName::Starting => "starting",
        PhaseName::Served => "served",
        PhaseName::Failed => "failed",
        PhaseName::Empty => "empty",
        PhaseName::Resting => "resting",
        PhaseName::Paused => "paused",
    }
}

/// The time since then, in one unit.
pub(crate) fn age(since: u64) -> String {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |now| now.as_secs());
    let seconds = now.saturating_sub(since);
    match seconds {
        0..120 => format!("{seconds}s"),
        120..7200 => format!("{}m", seconds / 60),
        7200..172_800 => format!("{}h", seconds / 3600),
        _ => format!("{}d", seconds / 86_400),
    }
}

fn show(run: &Path, disk: Vbd, json: bool) -> Result<(), Failure> {
    let details: Details = call(run, "disk.show", &ShowParams { disk: id(disk) }, ANSWER)
        .map_err(|e| of_disk("cannot show disk", disk, &e))?;
    let names = Names::read();
    let mut value = serde_json::to_value(&details).unwrap_or_default();
    add_name(&mut value["disk"], &details.disk, &names);
    tell(json, &value, || print!("{}", description(&details, &names)))
}

/// Whether the toolstack wants the disk to stay.
fn wanted(details: &Details) -> &'static str {
    match (details.disk.disk.is_tap(), details.disk.guest, details.online) {
        (true, None, _) => "yes: it is a tap, without a guest now",
        (_, _, true) => "yes",
        (true, Some(_), false) => "yes, and its guest is to leave it",
        (false, _, false) => "no: it is to be detached",
    }
}

fn description(details: &Details, names: &Names) -> String {
    let disk = &details.disk;
    let none = || "-".to_owned();
    let mut lines = vec![
        ("disk", disk.disk.to_string()),
        ("name", names.disk(vbd(disk.disk))),
        ("image", disk.image.clone().unwrap_or_else(none)),
        ("format", disk.format.map_or("-", |format| format.word()).to_owned()),
        ("phase", format!("{}, for {}", phase(disk.phase), age(disk.since))),
        ("pid", disk.pid.map_or_else(none, |pid| pid.to_string())),
        ("minor", disk.minor.to_string()),
        ("starts", disk.starts.to_string()),
        (
            "states",
            format!("{} (backend), {} (guest)", details.backend_state, details.frontend_state),
        ),
        ("wanted", wanted(details).to_owned()),
        ("nbd", details.nbd.clone().unwrap_or_else(none)),
        ("script", details.hotplug_status.clone().unwrap_or_else(none)),
    ];
    if disk.disk.is_tap() {
        lines.push(("guest", disk.guest.map_or_else(none, |guest| guest.to_string())));
    }
    let read_only = if details.read_only { "yes: so it was attached (access=r)" } else { "no" };
    lines.push(("read-only", read_only.to_owned()));
    if let Some(paused) = &disk.paused {
        lines.push(("paused", pause::note(disk, paused)));
    }
    if let Some(full) = &disk.full {
        lines.push(("space", space(full)));
    }
    if let Some(waits_for) = &details.waits_for {
        lines.push(("waits for", waits_for.clone()));
    }
    let text = lines.iter().map(|(name, value)| format!("{name:10} {}\n", one_line(value)));
    text.chain(details.settings.iter().map(setting)).collect()
}

fn setting(setting: &Setting) -> String {
    let from = match setting.from {
        Source::Default => "default",
        Source::Disks => "[disks]",
        Source::Image => "[images]",
        Source::Earlier => "an earlier configuration, until it is attached again",
        Source::Running => "set on the running disk",
    };
    let (key, value) = (one_line(&setting.key), one_line(&setting.value));
    format!("  {key:13} {value:11} {from}\n")
}

#[cfg(test)]
mod tests {
    use super::*;
    use ferrite_daemon::control::protocol::NotUpgraded;
    use ferrite_daemon::params::Format;

    fn disk(domid: u16, why: Option<&str>) -> Disk {
        Disk {
            disk: DiskId { domid, devid: 51712 },
            phase: if why.is_some() { PhaseName::Failed } else { PhaseName::Served },
            since: u64::MAX,
            format: Some(Format::Vhd),
            image: Some("/srv/a\u{1b}[31m.vhd".to_owned()),
            pid: Some(77),
            minor: 0,
            starts: 1,
            full: None,
            hangs: None,
            weak: false,
            paused: None,
            guest: None,
            why: why.map(str::to_owned),
            help: why.map(|_| "mend it".to_owned()),
        }
    }

    #[test]
    fn a_list_has_a_line_a_disk_and_one_for_each_reason() {
        let table = |disks: &[Disk], jobs: &[Job]| table(disks, jobs, &Names::default());
        let text = table(&[disk(1, None), disk(1000, Some("no such\nimage"))], &[]);
        let expected = "DISK        NAME       PHASE   FOR  PID  FORMAT  IMAGE\n\
                        1/51712     1/xvda     served  0s   77   vhd     /srv/a\\u{1b}[31m.vhd\n\
                        1000/51712  1000/xvda  failed  0s   77   vhd     /srv/a\\u{1b}[31m.vhd\n    \
                        no such\\nimage\n";
        assert_eq!(text, expected);
        let full = Some(Full { requests: 2, since: u64::MAX });
        let text = table(&[Disk { full, ..disk(1, None) }], &[]);
        let note = "    its storage is full: 2 requests wait for space, for 0s\n";
        assert!(text.ends_with(note), "{text}");
        let hangs = Some(Hangs { requests: 1, since: u64::MAX });
        let text = table(&[Disk { hangs, ..disk(1, None) }], &[]);
        let note = "    its storage does not answer: 1 request waits, for 0s\n";
        assert!(text.ends_with(note), "{text}");
        let text = table(&[Disk { weak: true, ..disk(1, None) }], &[]);
        assert!(text.contains("\n    WEAK: "), "{text}");
        assert_eq!(table(&[], &[]), "DISK  NAME  PHASE  FOR  PID  FORMAT  IMAGE\n");
    }

    #[test]
    fn an_upgrade_counts_disks_as_people_do() {
        let id = DiskId { domid: 1, devid: 51712 };
        let (why, help) = ("no".to_owned(), "yes".to_owned());
        let not = NotUpgraded { disk: id, why, help };
        for (upgraded, failed, said) in [
            (0, 0, "no disk is served\n"),
            (0, 1, ""),
            (1, 0, "1 disk is served by /bin/f\n"),
            (2, 1, "2 disks are served by /bin/f\n"),
        ] {
            let done = Upgraded { upgraded: vec![id; upgraded], failed: vec![not.clone(); failed] };
            assert_eq!(super::upgraded(&done, "/bin/f"), said);
        }
    }

    #[test]
    fn one_disk_is_described_with_what_it_waits_for() {
        let details = Details {
            disk: Disk { full: Some(Full { requests: 1, since: u64::MAX }), ..disk(1, None) },
            backend_state: 5,
            frontend_state: 4,
            online: false,
            read_only: true,
            settings: vec![Setting {
                key: "on_full".to_owned(),
                value: "wait".to_owned(),
                from: Source::Image,
            }],
            nbd: Some("/run/ferrite/vbd-1-51712/nbd".to_owned()),
            hotplug_status: None,
            waits_for: Some("the guest".to_owned()),
        };
        let text = description(&details, &Names::default());
        for line in [
            "disk       1/51712",
            "name       1/xvda",
            "states     5 (backend), 4 (guest)",
            "nbd        /run/ferrite/vbd-1-51712/nbd",
            "space      its storage is full: 1 request waits for space, for 0s",
            "waits for  the guest",
            "read-only  yes: so it was attached (access=r)",
            "  on_full       wait        [images]",
        ] {
            assert!(text.lines().any(|have| have == line), "{line}: {text}");
        }
        assert!(text.lines().all(|line| !line.contains('\u{1b}')));
    }
}
