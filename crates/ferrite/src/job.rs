//! `ferrite job`: shows the daemon's jobs, waits for them and changes them.

use std::io;
use std::path::Path;
use std::time::{Duration, Instant};

use ferrite_daemon::control::client::ClientError;
use ferrite_daemon::control::protocol::{
    CoalesceParams, Job, JobKind, JobLimitParams, JobList, JobParams, JobPhase, Nothing,
};
use ferrite_disk::size::Human;
use ferrite_image_tools::Progress;

use crate::disk::{ANSWER, age, call, id, not_answered, of_disk, tell, vbd};
use crate::exit::{Code, Failure};
use crate::guests::Names;
use crate::image::progress::Shown;
use crate::plain::one_line;
use crate::signals;

pub(crate) mod args;
pub(crate) mod mirror;

use args::{CoalesceArgs, JobArgs, JobCommand, OneJob, OutputArgs};

/// The pause between two looks at a job. A short job ends within the first second.
const LOOK: Duration = Duration::from_millis(50);
const LOOK_LATER: Duration = Duration::from_millis(250);
/// How long a daemon may take to come again that has answered before.
const COMES_AGAIN: Duration = Duration::from_secs(60);

pub(crate) fn run(args: &JobArgs) -> Result<(), Failure> {
    match &args.command {
        JobCommand::List(output) => list(output),
        JobCommand::Show(job) => {
            let found = ask(job, "cannot show", "job.show")?;
            tell(job.output.json, &found, || print!("{}", description(&found, &Names::read())))
        }
        JobCommand::Wait { timeout, job } => {
            let timeout = timeout.map(|seconds| Duration::from_secs(seconds.into()));
            let found = follow(&job.output.places.run_dir, job.id, timeout, None, |_| false)?;
            result(&found, &job.output)
        }
        JobCommand::Cancel(job) => {
            let found = ask(job, "cannot cancel", "job.cancel")?;
            tell(job.output.json, &found, || {
                let why = found.why.as_deref().map(|why| format!(": {}", one_line(why)));
                println!("{}{}", said(&found), why.unwrap_or_default());
            })
        }
        JobCommand::Pause(job) => {
            let found = ask(job, "cannot pause", "job.pause")?;
            tell(job.output.json, &found, || println!("{}", said(&found)))
        }
        JobCommand::Resume(job) => {
            let found = ask(job, "cannot resume", "job.resume")?;
            tell(job.output.json, &found, || println!("{}", said(&found)))
        }
        JobCommand::Limit { job, speed } => {
            let asked = JobLimitParams { id: job.id, speed: speed.0 };
            let found: Job = call(&job.output.places.run_dir, "job.limit", &asked, ANSWER)
                .map_err(|e| of_job("cannot limit", job.id, &e))?;
            tell(job.output.json, &found, || match found.speed {
                Some(speed) => println!("job {} does at most {}/s", found.id, Human(speed)),
                None => println!("job {} has no limit", found.id),
            })
        }
    }
}

/// `ferrite disk coalesce`: starts a job.
pub(crate) fn coalesce(args: &CoalesceArgs) -> Result<(), Failure> {
    let disk = args.disk.disk.find()?;
    let what = "cannot merge images of disk";
    let asked = CoalesceParams {
        disk: id(disk),
        from: args.from.as_deref().map(absolute).transpose()?,
        to: args.to.as_deref().map(absolute).transpose()?,
        force: args.force,
        speed: args.speed.and_then(|speed| speed.0),
    };
    let run = &args.output.places.run_dir;
    let job: Job =
        call(run, "disk.coalesce", &asked, ANSWER).map_err(|e| of_disk(what, disk, &e))?;
    if args.background {
        return tell(args.output.json, &job, || {
            println!("job {} is started; ferrite job wait {0} waits for it", job.id);
        });
    }
    let job = follow(run, job.id, None, Some(Instant::now()), |_| false)?;
    result(&job, &args.output)
}

/// The name of an image for the daemon, which has another working directory.
fn absolute(path: &Path) -> Result<String, Failure> {
    let what = || format!("cannot merge {}", path.display());
    let absolute = std::path::absolute(path)
        .map_err(|e| Failure::new(what(), e, "name it by its whole path"))?;
    absolute.into_os_string().into_string().map_err(|_| {
        Failure::new(what(), "its name is not UTF-8", "rename it, and correct its children")
    })
}

/// Calls a method on one job.
fn ask(job: &OneJob, what: &str, method: &str) -> Result<Job, Failure> {
    let asked = JobParams { id: job.id };
    call(&job.output.places.run_dir, method, &asked, ANSWER).map_err(|e| of_job(what, job.id, &e))
}

/// The failure of an operation on a job.
fn of_job(what: &str, id: u64, e: &ClientError) -> Failure {
    let why = e.to_string();
    let why = why.strip_prefix(&format!("job {id} ")).map_or(why.clone(), |w| format!("it {w}"));
    let failure = not_answered(&format!("{what} job {id}"), e, why);
    match e.is_no_job() {
        true => failure.with_code(Code::NOT_FOUND),
        false => failure,
    }
}

/// Waits for the end of a job, or until `is_enough` says so, with a progress bar. A daemon that is started again is waited for:
/// the next one goes on with the job. `answered` is when it has answered before.
pub(crate) fn follow(
    run: &Path,
    id: u64,
    timeout: Option<Duration>,
    mut answered: Option<Instant>,
    is_enough: impl Fn(&Job) -> bool,
) -> Result<Job, Failure> {
    let stop = signals::flag()?;
    let shown = Shown::new(false, stop);
    let start = Instant::now();
    let job = loop {
        let mut progress = Progress { done_bytes: 0, total_bytes: 0 };
        match call::<Job>(run, "job.show", &JobParams { id }, ANSWER) {
            Ok(job) if job.phase.has_ended() || is_enough(&job) => break Ok(job),
            Ok(job) => {
                answered = Some(Instant::now());
                progress = Progress { done_bytes: job.done, total_bytes: job.all };
            }
            Err(e) if answered.is_some_and(|last| last.elapsed() < COMES_AGAIN) && is_away(&e) => {}
            Err(e) => break Err(of_job("cannot wait for", id, &e)),
        }
        if !shown.show(progress) {
            let what = format!("stopped waiting for job {id}");
            let help =
                format!("ferrite job wait {id} waits again, ferrite job cancel {id} ends it");
            break Err(Failure::new(what, "interrupted; the job goes on", help)
                .with_code(Code::INTERRUPTED));
        }
        let waited = start.elapsed();
        if timeout.is_some_and(|timeout| waited >= timeout) {
            let what = format!("job {id} has not ended");
            let help = format!("ferrite job show {id} says how far it is; wait again");
            break Err(Failure::new(what, "the time is over; the job goes on", help));
        }
        std::thread::sleep(if waited < Duration::from_secs(1) { LOOK } else { LOOK_LATER });
    };
    shown.clear();
    job
}

/// Whether the daemon is being started again.
pub(crate) fn is_away(e: &ClientError) -> bool {
    match e {
        ClientError::Unreachable(e) => {
            matches!(e.kind(), io::ErrorKind::NotFound | io::ErrorKind::ConnectionRefused)
        }
        ClientError::Broken(_) => true,
        ClientError::Refused(_) => false,
    }
}

/// Prints the result of a job that has ended. One that is not done is a failure.
pub(crate) fn result(job: &Job, output: &OutputArgs) -> Result<(), Failure> {
    let is_done = job.phase == JobPhase::Done;
    if output.json || is_done {
        tell(output.json, job, || println!("{}", said(job)))?;
    }
    let what = said(job);
    match job.phase {
        JobPhase::Cancelled => {
            let why = job.why.as_deref().unwrap_or("ferrite job cancel was called");
            let help = job.help.as_deref().unwrap_or("start it again if need be");
            Err(Failure::new(what, why, help))
        }
        JobPhase::Failed => {
            let why = job.why.as_deref().unwrap_or("for no known reason");
            Err(Failure::new(what, why, job.help.clone().unwrap_or_default()))
        }
        _ => Ok(()),
    }
}

fn said(job: &Job) -> String {
    let is = match job.phase {
        JobPhase::Running => "goes on",
        JobPhase::Paused => "is paused",
        JobPhase::Cancelling => "is being cancelled",
        JobPhase::Done => "is done",
        JobPhase::Cancelled => "was cancelled",
        JobPhase::Failed => "has failed",
    };
    format!("job {} {is}", job.id)
}

fn list(output: &OutputArgs) -> Result<(), Failure> {
    let jobs: JobList = call(&output.places.run_dir, "job.list", &Nothing {}, ANSWER)
        .map_err(|e| not_answered("cannot list the jobs", &e, e.to_string()))?;
    tell(output.json, &jobs, || print!("{}", table(&jobs.jobs, &Names::read())))
}

/// One line per job, and one for the reason if it has failed.
fn table(jobs: &[Job], names: &Names) -> String {
    let titles = ["JOB", "KIND", "DISK", "PHASE", "STEP", "DONE", "RATE", "LEFT", "FOR"];
    let mut rows = vec![titles.map(str::to_owned)];
    for job in jobs {
        rows.push([
            job.id.to_string(),
            kind(job.kind).to_owned(),
            names.disk(vbd(job.disk)),
            phase(job.phase).to_owned(),
            one_line(&job.step).into_owned(),
            percent(job),
            if job.rate > 0 { format!("{}/s", Human(job.rate)) } else { "-".to_owned() },
            job.left_s.map_or_else(|| "-".to_owned(), clock),
            age(job.ended.unwrap_or(job.created)),
        ]);
    }
    let width = |column: usize| rows.iter().map(|row| row[column].chars().count()).max();
    let widths: Vec<usize> = (0..8).map(|column| width(column).unwrap_or(0)).collect();
    let mut text = String::new();
    for (i, row) in rows.iter().enumerate() {
        for (cell, width) in row.iter().zip(&widths) {
            text += &format!("{cell:width$}  ");
        }
        text += &format!("{}\n", row[8]);
        let why = i.checked_sub(1).and_then(|at| jobs[at].why.as_ref());
        text.extend(why.map(|why| format!("    {}\n", one_line(why))));
    }
    text
}

/// What a disk's job does, in a line.
pub(crate) fn note(job: &Job) -> String {
    let to = job.to.as_ref().map(|to| format!(" to {to}")).unwrap_or_default();
    let rate = if job.rate > 0 { format!(", {}/s", Human(job.rate)) } else { String::new() };
    let why = job.why.as_ref().map(|why| format!(": {why}")).unwrap_or_default();
    let (id, kind, step) = (job.id, kind(job.kind), &job.step);
    format!("job {id}: {kind}{to}, {} done, step {step}{rate}{why}", percent(job))
}

fn percent(job: &Job) -> String {
    match job.all {
        0 => "-".to_owned(),
        all => format!("{}%", u128::from(job.done.min(all)) * 100 / u128::from(all)),
    }
}

fn clock(seconds: u64) -> String {
    format!("{}:{:02}:{:02}", seconds / 3600, seconds / 60 % 60, seconds % 60)
}

pub(crate) fn kind(kind: JobKind) -> &'static str {
    match kind {
        JobKind::Coalesce => "coalesce",
        JobKind::Mirror => "mirror",
    }
}

fn phase(phase: JobPhase) -> &'static str {
    match phase {
        JobPhase::Running => "running",
        JobPhase::Paused => "paused",
        JobPhase::Cancelling => "cancelling",
        JobPhase::Done => "done",
        JobPhase::Cancelled => "cancelled",
        JobPhase::Failed => "failed",
    }
}

fn description(job: &Job, names: &Names) -> String {
    let mut lines = vec![
        ("job", job.id.to_string()),
        ("kind", kind(job.kind).to_owned()),
        ("disk", names.disk(vbd(job.disk))),
        ("image", job.image.clone()),
    ];
    lines.extend(job.from.iter().map(|from| ("from", from.clone())));
    lines.extend(job.to.iter().map(|to| ("to", to.clone())));
    lines.push(("phase", format!("{}, step {}", phase(job.phase), job.step)));
    if job.all > 0 {
        let done = format!("{} of {} ({})", Human(job.done), Human(job.all), percent(job));
        let rate = (job.rate > 0).then(|| format!(", {}/s", Human(job.rate)));
        let left = job.left_s.map(|left| format!(", {} left", clock(left)));
        lines.push(("progress", done + &rate.unwrap_or_default() + &left.unwrap_or_default()));
    }
    let limit = job.speed.map_or_else(|| "none".to_owned(), |speed| format!("{}/s", Human(speed)));
    lines.push(("limit", limit));
    lines.push(("begun", format!("{} ago", age(job.created))));
    lines.extend(job.ended.map(|ended| ("ended", format!("{} ago", age(ended)))));
    lines.extend(job.why.iter().map(|why| ("reason", why.clone())));
    lines.extend(job.help.iter().map(|help| ("help", help.clone())));
    let text = lines.iter().map(|(name, value)| format!("{name:10} {}\n", one_line(value)));
    text.collect()
}

#[cfg(test)]
mod tests {
    use ferrite_daemon::state::DiskId;

    use super::*;

    fn job(phase: JobPhase) -> Job {
        let failed = phase == JobPhase::Failed;
        Job {
            id: 7,
            kind: JobKind::Coalesce,
            disk: DiskId { domid: 3, devid: 51712 },
            image: "/srv/a\u{1b}[31m.vhd".to_owned(),
            from: Some("/srv/b.vhd".to_owned()),
            to: None,
            phase,
            step: "copy".to_owned(),
            created: u64::MAX,
            ended: failed.then_some(u64::MAX),
            done: 1 << 30,
            all: 4 << 30,
            rate: if failed { 0 } else { 10 << 20 },
            left_s: (!failed).then_some(3725),
            speed: (!failed).then_some(20 << 20),
            why: failed.then(|| "no\nroom".to_owned()),
            help: failed.then(|| "make room".to_owned()),
        }
    }

    #[test]
    fn a_list_has_a_line_a_job_and_one_for_each_reason() {
        let jobs = [job(JobPhase::Running), Job { all: 0, ..job(JobPhase::Failed) }];
        let text = table(&jobs, &Names::default());
        let expected = "JOB  KIND      DISK    PHASE    STEP  DONE  RATE      LEFT     FOR\n\
                        7    coalesce  3/xvda  running  copy  25%   10 MiB/s  1:02:05  0s\n\
                        7    coalesce  3/xvda  failed   copy  -     -         -        0s\n    \
                        no\\nroom\n";
        assert_eq!(text, expected);
    }

    #[test]
    fn one_job_is_described_with_its_progress_and_its_result() {
        let text = description(&job(JobPhase::Running), &Names::default());
        let progress = "progress   1 GiB of 4 GiB (25%), 10 MiB/s, 1:02:05 left";
        for line in ["phase      running, step copy", progress, "limit      20 MiB/s"] {
            assert!(text.lines().any(|have| have == line), "{line}: {text}");
        }
        let text = description(&job(JobPhase::Failed), &Names::default());
        for line in ["limit      none", "reason     no\\nroom", "help       make room"] {
            assert!(text.lines().any(|have| have == line), "{line}: {text}");
        }
        assert!(!text.contains('\u{1b}'));
    }
}
