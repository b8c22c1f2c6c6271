//! Tests of the tests: lines of code that keep a promise are removed, one at a time, and a named test must fail. The
//! list is `xtask/mutants.toml`; `docs/mutants.md` tells how to add to it.

use std::collections::VecDeque;
use std::process::ExitCode;
use std::sync::{Mutex, PoisonError};
use std::time::Instant;

use anyhow::{Context, Result, bail, ensure};

use crate::needs;
use ferrite_xenhost::packages;
use ferrite_xenhost::steps::{self, say, step};

mod copy;
mod list;
mod proof;
mod stop;

use copy::Copy;
use list::Mutant;
use proof::{End, Proof};
use stop::Stop;

/// Options of `cargo xtask mutants`.
#[derive(clap::Args)]
pub(crate) struct MutantsArguments {
    /// Run only those whose name contains one of these.
    names: Vec<String>,
    /// List them, with the test for each.
    #[arg(long, conflicts_with = "check")]
    list: bool,
    /// Check only that each can be applied and its test exists, as `cargo xtask test` does.
    #[arg(long)]
    check: bool,
    /// Try so many at the same time, each in a copy and a build folder of its own.
    #[arg(long, value_name = "N", default_value_t = 1,
          value_parser = clap::builder::RangedU64ValueParser::<usize>::new().range(1..=16))]
    jobs: usize,
}

/// Runs the selected mutants.
pub(crate) fn mutants(arguments: &MutantsArguments) -> Result<ExitCode> {
    let named = |mutant: &Mutant| {
        let is = |name: &String| mutant.name.contains(name);
        arguments.names.is_empty() || arguments.names.iter().any(is)
    };
    let mut chosen = list::read()?;
    chosen.retain(named);
    if chosen.is_empty() {
        bail!("no mutant has such a name; cargo xtask mutants --list shows all");
    }
    if arguments.list {
        for mutant in &chosen {
            println!(
                "{}: {}\n    {}: {}",
                mutant.name,
                mutant.breaks,
                mutant.file,
                mutant.proof()?
            );
        }
        return Ok(ExitCode::SUCCESS);
    }
    if arguments.check {
        check()?;
        return Ok(ExitCode::SUCCESS);
    }
    Ok(if run(chosen, arguments.jobs)? { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// The quick part, for every run of the tests: no mutant is outdated.
pub(crate) fn check() -> Result<()> {
    let mutants = list::read()?;
    list::check(&mutants)?;
    say(format!("{} mutants apply, and their tests exist", mutants.len()));
    Ok(())
}

/// Runs all of them. `false`: one survived.
pub(crate) fn nightly() -> Result<bool> {
    run(list::read()?, steps::cpus().min(2))
}

/// Runs these, `jobs` at a time.
fn run(mut mutants: Vec<Mutant>, jobs: usize) -> Result<bool> {
    list::check(&mutants)?;
    packages::ensure(&[needs::CHECKS])?;
    // Side by side stand those of one crate: the build that reverts one mutant makes the next.
    mutants.sort_by(|one, other| one.file.cmp(&other.file));
    let copies = (0..jobs).map(Copy::make).collect::<Result<Vec<Copy>>>()?;
    let stop = Stop::listen()?;
    step("the same tests without a mutant", || control(&copies, &mutants, &stop))?;
    let found = Mutex::new(Found::default());
    let all = mutants.len();
    each(&copies, mutants.iter().collect(), &stop, |copy, mutant: &Mutant| {
        let began = Instant::now();
        copy.apply(mutant)?;
        let end = mutant.proof()?.run(copy, &stop);
        copy.restore(mutant)?;
        if !stop.is_asked() {
            let mut found = found.lock().unwrap_or_else(PoisonError::into_inner);
            let word = found.add(mutant, end);
            let seconds = began.elapsed().as_secs_f64();
            say(format!("{}/{all} {}: {word} ({seconds:.0} s)", found.tried.len(), mutant.name));
        }
        Ok(())
    })?;
    found.into_inner().unwrap_or_else(PoisonError::into_inner).tell(&mutants)
}

/// Has each copy do this work, one of the list after the other. Two copies begin at different ends, so that each stays
/// in few crates.
fn each<T: Send>(
    copies: &[Copy],
    list: VecDeque<T>,
    stop: &Stop,
    work: impl Fn(&Copy, T) -> Result<()> + Sync,
) -> Result<()> {
    let list = Mutex::new(list);
    let queue = || list.lock().unwrap_or_else(PoisonError::into_inner);
    let next = |index: usize| match index.is_multiple_of(2) {
        true => queue().pop_front(),
        false => queue().pop_back(),
    };
    let all_of = |index: usize, copy: &Copy| -> Result<()> {
        while !stop.is_asked() {
            let Some(one) = next(index) else { break };
            // The other copies end, too: an error here is one of the whole run.
            work(copy, one).inspect_err(|_| drop(std::mem::take(&mut *queue())))?;
        }
        Ok(())
    };
    std::thread::scope(|scope| {
        let of_copy = |(index, copy)| scope.spawn(move || all_of(index, copy));
        let workers: Vec<_> = copies.iter().enumerate().map(of_copy).collect();
        workers.into_iter().try_for_each(|worker| worker.join().expect("work that does not panic"))
    })
}

/// The mutants that were tried.
#[derive(Default)]
struct Found {
    tried: Vec<String>,
    survived: Vec<String>,
    broken: Vec<String>,
}

impl Found {
    /// Adds one with its end, and says it in words.
    fn add(&mut self, mutant: &Mutant, end: Result<End>) -> String {
        self.tried.push(mutant.name.clone());
        match end {
            Ok(End::Failed { how }) => format!("noticed: {how}"),
            Ok(End::Passed { .. }) => {
                self.survived.push(mutant.name.clone());
                "SURVIVED".into()
            }
            Err(error) => {
                self.broken.push(mutant.name.clone());
                format!("CANNOT BE TRIED: {}", steps::chain(&error))
            }
        }
    }

    /// Prints the results. `false`: one was not noticed.
    fn tell(&self, mutants: &[Mutant]) -> Result<bool> {
        for (what, names) in
            [("no test notices", &self.survived), ("cannot be tried", &self.broken)]
        {
            if !names.is_empty() {
                say(format!("{what}: {}", names.join(", ")));
            }
        }
        let tried = self.tried.len();
        let noticed = tried - self.survived.len() - self.broken.len();
        say(format!("{noticed} of {} mutants noticed, {:.0} s", mutants.len(), steps::elapsed_s()));
        let names = mutants.iter().map(|mutant| mutant.name.as_str());
        let missing: Vec<&str> =
            names.filter(|name| self.tried.iter().all(|tried| tried != name)).collect();
        ensure!(missing.is_empty(), "interrupted; not tried: {}", missing.join(", "));
        Ok(noticed == tried)
    }
}

/// Checks the tests without a mutant: one that fails or runs nothing would fail for every mutant.
fn control(copies: &[Copy], mutants: &[Mutant], stop: &Stop) -> Result<()> {
    let mut proofs: Vec<Proof> = mutants.iter().map(Mutant::proof).collect::<Result<_>>()?;
    proofs.sort();
    proofs.dedup();
    each(copies, proofs.into(), stop, |copy, proof: Proof| {
        match proof.run(copy, stop).with_context(|| proof.to_string())? {
            End::Passed { ran: true } => Ok(()),
            End::Passed { ran: false } => bail!("`{proof}` runs no test"),
            End::Failed { .. } if stop.is_asked() => Ok(()),
            End::Failed { how } => bail!("`{proof}` fails without a mutant: {how}"),
        }
    })
}
