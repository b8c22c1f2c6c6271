//! Tests of the tests: lines of code that keep a promise are removed, one at a time, and a named test must fail. The
//! list is `xtask/mutants.toml`; `docs/mutants.md` tells how to add to it.

use std::process::ExitCode;
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
    Ok(if run(&chosen)? { ExitCode::SUCCESS } else { ExitCode::FAILURE })
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
    run(&list::read()?)
}

fn run(mutants: &[Mutant]) -> Result<bool> {
    list::check(mutants)?;
    packages::ensure(&[needs::CHECKS])?;
    let copy = Copy::make()?;
    let stop = Stop::listen()?;
    step("the same tests without a mutant", || control(&copy, mutants, &stop))?;
    let (mut tried, mut survived, mut broken) = (0, Vec::new(), Vec::new());
    for mutant in mutants {
        let began = Instant::now();
        copy.apply(mutant)?;
        let end = mutant.proof()?.run(&copy, &stop);
        copy.restore(mutant)?;
        if stop.is_asked() {
            break;
        }
        tried += 1;
        let word = match end {
            Ok(End::Failed { how }) => format!("noticed: {how}"),
            Ok(End::Passed { .. }) => {
                survived.push(mutant.name.as_str());
                "SURVIVED".into()
            }
            Err(error) => {
                broken.push(mutant.name.as_str());
                format!("CANNOT BE TRIED: {}", steps::chain(&error))
            }
        };
        let seconds = began.elapsed().as_secs_f64();
        say(format!("{tried}/{} {}: {word} ({seconds:.0} s)", mutants.len(), mutant.name));
    }
    for (what, names) in [("no test notices", &survived), ("cannot be tried", &broken)] {
        if !names.is_empty() {
            say(format!("{what}: {}", names.join(", ")));
        }
    }
    let noticed = tried - survived.len() - broken.len();
    say(format!("{noticed} of {} mutants noticed, {:.0} s", mutants.len(), steps::elapsed_s()));
    ensure!(tried == mutants.len(), "interrupted; not tried: {}", names(&mutants[tried..]));
    Ok(noticed == tried)
}

fn names(mutants: &[Mutant]) -> String {
    mutants.iter().map(|mutant| mutant.name.as_str()).collect::<Vec<_>>().join(", ")
}

/// Checks the tests without a mutant: one that fails or runs nothing would fail for every mutant.
fn control(copy: &Copy, mutants: &[Mutant], stop: &Stop) -> Result<()> {
    let mut proofs: Vec<Proof> = mutants.iter().map(Mutant::proof).collect::<Result<_>>()?;
    proofs.sort();
    proofs.dedup();
    for proof in proofs {
        match proof.run(copy, stop).with_context(|| proof.to_string())? {
            End::Passed { ran: true } => {}
            End::Passed { ran: false } => bail!("`{proof}` runs no test"),
            End::Failed { how } => bail!("`{proof}` fails without a mutant: {how}"),
        }
    }
    Ok(())
}
