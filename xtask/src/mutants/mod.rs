//! Tests of the tests: lines of code that keep a promise are taken out, one at a time, and a named
//! test must fail. The list is `xtask/mutants.toml`; `docs/mutants.md` says how to add to it.

use std::process::ExitCode;
use std::time::Instant;

use anyhow::{Context, Result, bail};

use crate::packages;
use crate::steps::{self, say, step};

mod copy;
mod list;
mod proof;

use copy::Copy;
use list::Mutant;
use proof::{End, Proof};

/// Options of `cargo xtask mutants`.
#[derive(clap::Args)]
pub(crate) struct MutantsArguments {
    /// Only those whose name contains one of these.
    names: Vec<String>,
    /// Shows them, and what must notice each.
    #[arg(long, conflicts_with = "check")]
    list: bool,
    /// Only looks whether each can be applied and its test exists, as `cargo xtask test` does.
    #[arg(long)]
    check: bool,
}

/// Runs those that were asked for.
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

/// The quick part, for every run of the tests: no mutant is out of date.
pub(crate) fn check() -> Result<()> {
    let mutants = list::read()?;
    list::check(&mutants)?;
    say(format!("{} mutants apply, and their tests exist", mutants.len()));
    Ok(())
}

/// All of them. False: one survived.
pub(crate) fn nightly() -> Result<bool> {
    run(&list::read()?)
}

fn run(mutants: &[Mutant]) -> Result<bool> {
    list::check(mutants)?;
    packages::ensure(&[packages::CHECKS])?;
    let copy = Copy::make()?;
    step("the same tests without a mutant", || control(&copy, mutants))?;
    let mut survived = Vec::new();
    for (i, mutant) in mutants.iter().enumerate() {
        let began = Instant::now();
        copy.apply(mutant)?;
        let end = mutant.proof()?.run(&copy).with_context(|| mutant.name.clone());
        copy.restore(mutant)?;
        let (number, all) = (i + 1, mutants.len());
        let seconds = began.elapsed().as_secs_f64();
        let word = match end? {
            End::Passed { .. } => {
                survived.push(mutant.name.as_str());
                "SURVIVED".into()
            }
            End::Failed { how } => format!("noticed: {how}"),
        };
        say(format!("{number}/{all} {}: {word} ({seconds:.0} s)", mutant.name));
    }
    if !survived.is_empty() {
        say(format!("no test notices: {}", survived.join(", ")));
    }
    let noticed = mutants.len() - survived.len();
    say(format!("{noticed} of {} mutants noticed, {:.0} s", mutants.len(), steps::elapsed_s()));
    Ok(survived.is_empty())
}

/// A test that fails without any mutant, or runs nothing, would notice everything.
fn control(copy: &Copy, mutants: &[Mutant]) -> Result<()> {
    let mut proofs: Vec<Proof> = mutants.iter().map(Mutant::proof).collect::<Result<_>>()?;
    proofs.sort();
    proofs.dedup();
    for proof in proofs {
        match proof.run(copy)? {
            End::Passed { ran: true } => {}
            End::Passed { ran: false } => bail!("`{proof}` runs no test"),
            End::Failed { how } => bail!("`{proof}` fails without a mutant: {how}"),
        }
    }
    Ok(())
}
