//! `ferrite migrate`: moves a running disk to the daemon of another host.

use std::time::{Duration, Instant};

use clap::{Args, Subcommand};
use ferrite_daemon::control::client::ClientError;
use ferrite_daemon::control::protocol::{
    Holder, Job, MigrateCommitParams, MigratePrepareParams, MigrateResolveParams, MigrateRunParams,
    Migration, MigrationDirection, MigrationList, MigrationParams, Nothing,
};

use crate::cli::DiskArg;
use crate::disk::{age, call, id, not_answered, of_disk, tell, vbd};
use crate::exit::{Code, Failure};
use crate::guests::{GuestDisk, Names};
use crate::job::args::{OutputArgs, Speed};
use crate::job::mirror::IN_STEP;
use crate::job::{follow, result};
use crate::plain::one_line;

/// Time for an answer of the daemon, which may wait for the other host's.
const ANSWER: Duration = Duration::from_secs(150);

/// Time for the copies of parents: no limit that a copy reaches.
const COPIES: Duration = Duration::from_secs(30 * 24 * 3600);

/// The help after the options.
pub(crate) const HELP: &str = "Both daemons need [migration] in ferrite.toml: certificates, and the receiver listen and \
    folder. The steps are commands of their own, for toolstacks: prepare (the other host makes an image), run (copies, and \
    each write goes to both), commit (the other host has the disk from then on), abort. After a crash of either \
    side one host opens the disk for writing, or none until both reach each other again; if one is lost for good, \
    resolve says which host has it.";

/// `ferrite migrate`.
#[derive(Debug, Args)]
#[command(args_conflicts_with_subcommands = true, subcommand_negates_reqs = true)]
pub(crate) struct MigrateArgs {
    #[command(subcommand)]
    command: Option<MigrateCommand>,

    /// The guest by name, UUID or number, and the device as xvda, hda, sda or as a number (web1/xvda).
    #[arg(value_name = "GUEST/DEV", required = true)]
    disk: Option<GuestDisk>,

    /// The other host: a name of hosts below [migration] in ferrite.toml, or HOST:PORT.
    #[arg(value_name = "HOST", required = true)]
    host: Option<String>,

    /// The name of the image's file there; default: its name here.
    #[arg(long)]
    name: Option<String>,

    /// The image there that the new one stands on: one of its bases (ferrite.toml). Only what differs from it is copied;
    /// without it the image there has all data of the chain.
    #[arg(long, value_name = "IMAGE")]
    base: Option<String>,

    /// Copy the parents of the disk first, down to the one that the other host has as --base, or all. The image there
    /// stands on these copies.
    #[arg(long)]
    chain: bool,

    /// Copy at most so many bytes a second, such as 50M; writes of the guest are not limited.
    #[arg(long, value_name = "BYTES_PER_S")]
    speed: Option<Speed>,

    /// Have the guest wait at the end until its disk is detached. Otherwise it goes on here, with the image there.
    #[arg(long)]
    detach: bool,

    #[command(flatten)]
    output: OutputArgs,
}

/// The steps, and what there is to see.
#[derive(Debug, Subcommand)]
enum MigrateCommand {
    /// Have the other host make an image for the disk.
    Prepare {
        #[command(flatten)]
        disk: DiskArg,
        /// The other host: a name of hosts below [migration] in ferrite.toml, or HOST:PORT.
        #[arg(value_name = "HOST")]
        host: String,
        /// The name of the image's file there; default: its name here.
        #[arg(long)]
        name: Option<String>,
        /// The image there that the new one stands on: one of its bases (ferrite.toml).
        #[arg(long, value_name = "IMAGE")]
        base: Option<String>,
        /// Copy the parents of the disk first, down to that base, or all. It waits for these copies.
        #[arg(long)]
        chain: bool,
        #[command(flatten)]
        output: OutputArgs,
    },
    /// Copy the disk, and have each write go to both; ends when the other host has all.
    Run {
        #[command(flatten)]
        disk: DiskArg,
        /// Copy at most so many bytes a second, such as 50M.
        #[arg(long, value_name = "BYTES_PER_S")]
        speed: Option<Speed>,
        /// Start the copy, and do not wait.
        #[arg(long)]
        background: bool,
        #[command(flatten)]
        output: OutputArgs,
    },
    /// Give the disk to the other host, as soon as that has all.
    Commit {
        #[command(flatten)]
        disk: DiskArg,
        /// Have the guest wait until its disk is detached.
        #[arg(long)]
        detach: bool,
        #[command(flatten)]
        output: OutputArgs,
    },
    /// Give a migration up: the disk stays here, unless the other host has it already.
    Abort(OneArgs),
    /// List migrations to and from this host.
    List(OutputArgs),
    /// Show one migration.
    Status(OneArgs),
    /// Say which host has a disk, where one of the two is lost for good. Say the same on both hosts.
    Resolve {
        #[command(flatten)]
        one: OneArgs,
        /// This host has the disk.
        #[arg(long, required_unless_present = "there", conflicts_with = "there")]
        here: bool,
        /// The other host has the disk.
        #[arg(long)]
        there: bool,
    },
    /// Remove the record of a migration that is over.
    Forget(OneArgs),
}

/// One migration.
#[derive(Debug, Args)]
struct OneArgs {
    /// The disk (GUEST/DEV), the path of its image here, or the migration's identifier or its beginning.
    #[arg(value_name = "DISK")]
    which: String,

    #[command(flatten)]
    output: OutputArgs,
}

pub(crate) fn run(args: &MigrateArgs) -> Result<(), Failure> {
    match &args.command {
        None => all(args),
        Some(MigrateCommand::Prepare { disk, host, name, base, chain, output }) => {
            let made = prepare(&disk.disk, host, (name, base, *chain), output)?;
            say(output, &made)
        }
        Some(MigrateCommand::Run { disk, speed, background, output }) => {
            let asked =
                MigrateRunParams { disk: id(disk.disk.find()?), speed: speed.and_then(|s| s.0) };
            copy(&disk.disk, &asked, *background, output)
        }
        Some(MigrateCommand::Commit { disk, detach, output }) => {
            commit(&disk.disk, !detach, output)
        }
        Some(MigrateCommand::Abort(one)) => {
            let asked = MigrationParams { id: find(one)?.id };
            let done: Migration = ask(one, "cannot give up", "migrate.abort", &asked)?;
            say(&one.output, &done)
        }
        Some(MigrateCommand::List(output)) => {
            let found = list(output)?;
            tell(output.json, &found, || print!("{}", table(&found.migrations, &Names::read())))
        }
        Some(MigrateCommand::Status(one)) => say(&one.output, &find(one)?),
        Some(MigrateCommand::Resolve { one, here, .. }) => {
            let asked = MigrateResolveParams { id: find(one)?.id, here: *here };
            let done: Migration = ask(one, "cannot decide", "migrate.resolve", &asked)?;
            say(&one.output, &done)
        }
        Some(MigrateCommand::Forget(one)) => {
            let asked = MigrationParams { id: find(one)?.id };
            let left: MigrationList = ask(one, "cannot forget", "migrate.forget", &asked)?;
            tell(one.output.json, &left, || println!("migration {} is forgotten", asked.id))
        }
    }
}

/// Does all steps.
fn all(args: &MigrateArgs) -> Result<(), Failure> {
    let (Some(disk), Some(host)) = (&args.disk, &args.host) else {
        let help = "ferrite migrate GUEST/DEV HOST";
        let failure = Failure::new("cannot migrate", "no disk and host are named", help);
        return Err(failure.with_code(Code::USAGE));
    };
    let made = prepare(disk, host, (&args.name, &args.base, args.chain), &args.output)?;
    let asked = MigrateRunParams { disk: id(disk.find()?), speed: args.speed.and_then(|s| s.0) };
    let run = &args.output.places.run_dir;
    let done = start(disk, &asked, &args.output).and_then(|job| {
        let job = follow(run, job, None, Some(Instant::now()), |job| job.step == IN_STEP)?;
        if job.phase.has_ended() {
            result(&job, &args.output)
        } else {
            commit(disk, !args.detach, &args.output)
        }
    });
    done.map_err(|failure| {
        let more = format!(
            "ferrite migrate status {} shows the migration, abort gives it up",
            &made.id[..8]
        );
        failure.with_more_help(&more)
    })
}

fn prepare(
    disk: &GuestDisk,
    host: &str,
    (name, base, chain): (&Option<String>, &Option<String>, bool),
    output: &OutputArgs,
) -> Result<Migration, Failure> {
    let disk = disk.find()?;
    let (host, name, base) = (host.to_owned(), name.clone(), base.clone());
    let asked = MigratePrepareParams { disk: id(disk), host, name, base, chain };
    let within = if chain { COPIES } else { ANSWER };
    call(&output.places.run_dir, "migrate.prepare", &asked, within)
        .map_err(|e| of_disk("cannot migrate disk", disk, &e))
}

/// Starts the copy. Returns its job.
fn start(disk: &GuestDisk, asked: &MigrateRunParams, output: &OutputArgs) -> Result<u64, Failure> {
    let disk = disk.find()?;
    let started: Migration = call(&output.places.run_dir, "migrate.run", asked, ANSWER)
        .map_err(|e| of_disk("cannot copy disk", disk, &e))?;
    started.job.ok_or_else(|| {
        let help = "ferrite job list has the reason";
        Failure::new(format!("cannot copy disk {disk}"), "the job has ended at once", help)
    })
}

fn copy(
    disk: &GuestDisk,
    asked: &MigrateRunParams,
    background: bool,
    output: &OutputArgs,
) -> Result<(), Failure> {
    let job = start(disk, asked, output)?;
    let is_enough = |job: &Job| background || job.step == IN_STEP;
    let job = follow(&output.places.run_dir, job, None, Some(Instant::now()), is_enough)?;
    if job.phase.has_ended() {
        return result(&job, output);
    }
    tell(output.json, &job, || match background {
        true => println!("job {} copies the disk; ferrite job show {0} says how far it is", job.id),
        false => println!(
            "the other host has all, and gets each write; ferrite migrate commit gives it the disk"
        ),
    })
}

fn commit(disk: &GuestDisk, keep: bool, output: &OutputArgs) -> Result<(), Failure> {
    let disk = disk.find()?;
    let run = &output.places.run_dir;
    let asked = MigrateCommitParams { disk: id(disk), keep };
    let begun: Migration = call(run, "migrate.commit", &asked, ANSWER)
        .map_err(|e| of_disk("cannot commit the migration of disk", disk, &e))?;
    if let Some(job) = begun.job {
        let job = follow(run, job, None, Some(Instant::now()), |_| false)?;
        if job.phase != ferrite_daemon::control::protocol::JobPhase::Done {
            return result(&job, output);
        }
    }
    let all = list(output)?;
    match all.migrations.into_iter().find(|it| it.id == begun.id) {
        Some(done) => say(output, &done),
        None => Ok(()),
    }
}

fn list(output: &OutputArgs) -> Result<MigrationList, Failure> {
    call(&output.places.run_dir, "migrate.list", &Nothing {}, ANSWER)
        .map_err(|e| not_answered("cannot list the migrations", &e, e.to_string()))
}

fn ask<T: serde::de::DeserializeOwned>(
    one: &OneArgs,
    what: &str,
    method: &str,
    asked: &impl serde::Serialize,
) -> Result<T, Failure> {
    call(&one.output.places.run_dir, method, asked, ANSWER).map_err(|e: ClientError| {
        not_answered(&format!("{what} the migration {}", one.which), &e, e.to_string())
    })
}

/// The migration of this name: that of a disk that is not over, or the last one.
fn find(one: &OneArgs) -> Result<Migration, Failure> {
    let disk = one.which.parse::<GuestDisk>().ok().and_then(|disk| disk.find().ok()).map(id);
    let is_it = |it: &Migration| {
        let is_id = one.which.len() >= 4 && it.id.starts_with(&one.which);
        is_id || it.image == one.which || (disk.is_some() && it.disk == disk)
    };
    let found: Vec<Migration> = list(&one.output)?.migrations.into_iter().filter(is_it).collect();
    let open = found.iter().rposition(|it| !it.over);
    let at = open.or(found.len().checked_sub(1));
    at.map(|at| found[at].clone()).ok_or_else(|| {
        let what = format!("cannot find a migration {}", one_line(&one.which));
        let help = "ferrite migrate list shows all, with their identifiers";
        Failure::new(what, "there is none", help).with_code(Code::NOT_FOUND)
    })
}

fn say(output: &OutputArgs, it: &Migration) -> Result<(), Failure> {
    tell(output.json, it, || print!("{}", described(it, &Names::read())))
}

fn holder(it: &Migration) -> &'static str {
    match (it.holder, it.over) {
        (Holder::Here, _) => "this host has the disk",
        (Holder::There, _) => "the other host has the disk",
        (Holder::Doubt, _) if it.direction == MigrationDirection::In => "the disk comes",
        (Holder::Doubt, _) => "not known which host has the disk",
    }
}

fn described(it: &Migration, names: &Names) -> String {
    let mut text = format!("migration {}: {}\n", it.id, holder(it));
    if let Some(disk) = it.disk {
        text += &format!("disk       {}\n", names.disk(vbd(disk)));
    }
    text += &format!("image      {}\n", one_line(&it.image));
    text.extend(it.host.as_ref().map(|host| format!("to         {}\n", one_line(host))));
    text.extend(it.target.as_ref().map(|uri| format!("there      {}\n", one_line(uri))));
    text.extend(it.job.map(|job| format!("job        {job}\n")));
    text.extend(it.why.as_ref().map(|why| format!("note       {}\n", one_line(why))));
    text.extend(it.help.as_ref().map(|help| format!("help       {}\n", one_line(help))));
    text
}

/// One line for each migration.
fn table(all: &[Migration], names: &Names) -> String {
    let mut text = String::new();
    for it in all {
        let way = match it.direction {
            MigrationDirection::Out => "to",
            MigrationDirection::In => "from",
        };
        let host = it.host.as_deref().unwrap_or("another host");
        let disk = it.disk.map_or_else(|| "-".to_owned(), |disk| names.disk(vbd(disk)));
        let (id, image, host) = (&it.id[..8.min(it.id.len())], one_line(&it.image), one_line(host));
        let over = if it.over { "over" } else { "open" };
        text += &format!(
            "{id}  {disk}  {way} {host}  {over}  {}  {}  {image}\n",
            age(it.created),
            holder(it)
        );
    }
    text
}
