//! Settings of running disks: their limits, and what else can change without a restart.
//!
//! The disk's thread makes a setting. It writes it to the state file first, and then gives it to the
//! worker. If the daemon dies between the two, the next one finds it in the file, and gives it to the
//! worker that it follows. Each worker gets it before it serves the guest. A worker that does not know
//! settings keeps serving, and the file has its old contents again.

use std::time::Duration;

use ferrite_serve::blkif::lifecycle::{ServeError, Tune};

use crate::config::DiskOptions;
use crate::control::protocol::{Setting, Source};
use crate::state::DiskId;
use crate::table::{Phase, Table, detached};
use crate::{Assignment, Failure, Shared};

/// How long a disk's thread may take to make a setting.
const TIMEOUT: Duration = Duration::from_secs(30);

/// The state of a change of a disk's settings.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) enum Tuning {
    /// No change was requested.
    #[default]
    None,
    /// This is to be set.
    Requested(Tune),
    /// The result of the last change.
    Done(Result<(), Failure>),
}

impl Tuning {
    /// Ends a requested change with this failure.
    pub(crate) fn fail(&mut self, why: &Failure) {
        if matches!(self, Tuning::Requested(_)) {
            *self = Tuning::Done(Err(why.clone()));
        }
    }
}

impl Assignment<'_> {
    /// The settings of the disk's worker, which is about to be followed. Requested ones are in the
    /// state file when this returns.
    pub(crate) fn tune(&self) -> Tune {
        let (mut current, mut wanted) = (Tune::default(), None);
        self.shared.table.change(self.id, |entry| {
            current = entry.tune.clone();
            if let Tuning::Requested(tune) = &entry.tuning {
                wanted = Some(entry.tune.then(tune));
            }
        });
        let Some(wanted) = wanted else { return current };
        match self.write_tune(&wanted) {
            Ok(()) => wanted,
            Err(e) => {
                self.shared.table.change(self.id, |entry| entry.tuning.fail(&e));
                current
            }
        }
    }

    /// Records whether a worker has taken these settings.
    pub(crate) fn tuned(&self, given: &Tune, taken: Result<(), ServeError>) {
        let (mut requested, mut before) = (false, Tune::default());
        self.shared.table.change(self.id, |entry| {
            let Tuning::Requested(tune) = &entry.tuning else { return };
            // Another change may have been requested since the settings were read. The thread was
            // woken for it.
            requested = entry.tune.then(tune) == *given;
            before = entry.tune.clone();
            if requested && taken.is_ok() {
                (entry.tune, entry.tuning) = (given.clone(), Tuning::Done(Ok(())));
            }
        });
        let Err(e) = taken else { return };
        if !requested {
            tracing::warn!("disk {} is served without what was set on it: {e}", self.id);
            return;
        }
        let failure = match e {
            ServeError::Open { what, why, help, .. } => {
                Failure { why: format!("{what}: {why}"), help }
            }
            e => Failure { why: e.to_string(), help: "the daemon's log has more".to_owned() },
        };
        let failure = self.write_tune(&before).err().unwrap_or(failure);
        self.shared.table.change(self.id, |entry| entry.tuning.fail(&failure));
    }

    /// Writes the settings to the disk's state file.
    fn write_tune(&self, tune: &Tune) -> Result<(), Failure> {
        let states = &self.shared.states;
        let written = states.read(self.id).and_then(|state| {
            let state = state.ok_or_else(|| std::io::Error::other("there is none"))?;
            states.write(&state.tuned(tune.clone()))
        });
        written.map_err(|e| Failure {
            why: format!("cannot write the disk's state file: {e}"),
            help: "make room on the file system of /run, then try again".to_owned(),
        })
    }
}

/// Requests that this is set on a disk, and waits for the result.
///
/// # Errors
/// The disk is not served, or its worker does not take the settings: nothing was changed.
pub(crate) fn set(shared: &Shared, id: DiskId, tune: &Tune) -> Result<(), Failure> {
    request(&shared.table, id, tune)?;
    let done = shared.table.wait_for(TIMEOUT, |disks| match disks.get(&id) {
        None => Some(Err(detached())),
        Some(entry) => match &entry.tuning {
            Tuning::Requested(_) => None,
            Tuning::Done(done) => Some(done.clone()),
            Tuning::None => Some(Ok(())),
        },
    });
    done.unwrap_or_else(|| {
        let why = "the disk's worker does not answer".to_owned();
        let help = "it is set when the worker answers: ferrite disk show says whether it is";
        Err(Failure { why, help: help.to_owned() })
    })
}

fn request(table: &Table, id: DiskId, tune: &Tune) -> Result<(), Failure> {
    let mut requested = Err(detached());
    let failure = |why: String, help: String| Err(Failure { why, help });
    table.change(id, |entry| {
        requested = match (&entry.phase, entry.beside, &entry.tuning) {
            (_, Some(first), _) => failure(
                format!("it is a stub domain's and served with disk {first}"),
                format!("set it on disk {first}: it holds for both"),
            ),
            (Phase::Served, None, Tuning::Requested(_)) => failure(
                "another change of this disk is in progress".to_owned(),
                "try again later".to_owned(),
            ),
            (Phase::Served, None, _) if tune.cpu.is_some() && entry.group.is_some() => failure(
                "the disks of a store share one worker, and its processor time".to_owned(),
                "set cpu below [disks] in the configuration; it holds for stores that are used \
                 after a restart of the daemon"
                    .to_owned(),
            ),
            (Phase::Served, None, _) => {
                entry.tuning = Tuning::Requested(tune.clone());
                entry.wake();
                Ok(())
            }
            _ => failure(
                "it is not served now".to_owned(),
                format!("ferrite disk show {id} has the reason; try again when it is served"),
            ),
        };
    });
    requested
}

/// Shows the settings of a running disk in the place of its options.
pub(crate) fn show(settings: &mut [Setting], tune: &Tune) {
    let Tune { limits, on_full, poll_us, cpu } = tune;
    let mut shown = DiskOptions::default();
    let set = [
        ("limit", limits.map(|limits| shown.limits = limits).is_some()),
        ("on_full", on_full.map(|on_full| shown.on_full = on_full).is_some()),
        ("poll_us", poll_us.map(|window| shown.poll = window).is_some()),
        ("cpu", cpu.map(|cpu| shown.cpu = Some(cpu).filter(|cpu| *cpu > 0)).is_some()),
    ];
    for (key, value) in shown.values() {
        if set.contains(&(key, true))
            && let Some(setting) = settings.iter_mut().find(|setting| setting.key == key)
        {
            (setting.value, setting.from) = (value, Source::Running);
        }
    }
}
