//! `ferrite mirror`: a job that has all writes of a disk go to a second one, too.

use std::time::Instant;

use ferrite_daemon::control::protocol::{Job, JobKind, JobList, JobParams, MirrorParams, Nothing};

use super::args::{MirrorArgs, MirrorCommand, OutputArgs};
use super::{follow, result};
use crate::cli::DiskArg;
use crate::disk::pause::named;
use crate::disk::{ANSWER, call, id, not_answered, of_disk, tell};
use crate::exit::{Code, Failure};

/// The step of a mirror whose target has all.
pub(crate) const IN_STEP: &str = "mirror";

pub(crate) fn run(args: &MirrorArgs) -> Result<(), Failure> {
    if let Some(MirrorCommand::Complete { disk, output }) = &args.command {
        return complete(disk, output);
    }
    let (Some(disk), Some(target)) = (&args.disk, &args.target) else {
        let help = "ferrite mirror GUEST/DEV TARGET";
        let failure = Failure::new("cannot mirror", "no disk and target are named", help);
        return Err(failure.with_code(Code::USAGE));
    };
    let disk = disk.find()?;
    let target = match target.starts_with("nbd") && target.contains("://") {
        true => target.clone(),
        false => named("cannot mirror to", target.as_ref())?,
    };
    let speed = args.speed.and_then(|speed| speed.0);
    let (switch, resume, compare) = (args.switch, args.resume, args.compare);
    let asked = MirrorParams { disk: id(disk), target, switch, resume, compare, speed };
    let run = &args.output.places.run_dir;
    let job: Job = call(run, "disk.mirror", &asked, ANSWER)
        .map_err(|e| of_disk("cannot mirror disk", disk, &e))?;
    if args.background {
        return tell(args.output.json, &job, || {
            println!("job {} is started; ferrite job show {0} says how far it is", job.id);
        });
    }
    let is_enough = |job: &Job| !args.switch && job.step == IN_STEP;
    let job = follow(run, job.id, None, Some(Instant::now()), is_enough)?;
    if job.phase.has_ended() {
        return result(&job, &args.output);
    }
    tell(args.output.json, &job, || {
        println!(
            "the target has all, and gets each write from now on; job {} lasts until it is cancelled \
             (ferrite job cancel {0}) or completed (ferrite mirror complete {disk})",
            job.id
        );
    })
}

fn complete(disk: &DiskArg, output: &OutputArgs) -> Result<(), Failure> {
    let disk = disk.disk.find()?;
    let run = &output.places.run_dir;
    let jobs: JobList = call(run, "job.list", &Nothing {}, ANSWER)
        .map_err(|e| not_answered("cannot list the jobs", &e, e.to_string()))?;
    let is_it =
        |job: &&Job| job.kind == JobKind::Mirror && job.disk == id(disk) && !job.phase.has_ended();
    let Some(job) = jobs.jobs.iter().find(is_it) else {
        let what = format!("cannot complete the mirror of disk {disk}");
        let help = "ferrite job list shows the jobs; ferrite mirror GUEST/DEV TARGET begins one";
        return Err(Failure::new(what, "it has none", help).with_code(Code::NOT_FOUND));
    };
    let asked = JobParams { id: job.id };
    let job: Job = call(run, "job.complete", &asked, ANSWER)
        .map_err(|e| of_disk("cannot complete the mirror of disk", disk, &e))?;
    let job = follow(run, job.id, None, Some(Instant::now()), |_| false)?;
    result(&job, output)
}
