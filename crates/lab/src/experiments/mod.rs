//! The experiments of the published sources, each a file: what it shows, how it is run, and why our figures differ.

pub(crate) mod aggregate;
pub(crate) mod findings;
mod fragmentation;
mod in_flight;
pub(crate) mod lab;
mod metadata_cache;
mod multiqueue;
mod on_xen;
mod peers;
pub(crate) mod persistent;
mod polling;
mod queue_length;
mod request_size;
mod store_cache;

use anyhow::Result;
use findings::Findings;
use lab::Lab;

use crate::report;

/// A published experiment that can be run here.
pub(crate) struct Experiment {
    pub(crate) name: &'static str,
    /// One sentence.
    pub(crate) shows: &'static str,
    /// The source, and its result.
    pub(crate) source: &'static str,
    /// Why our figures differ from the source's.
    pub(crate) differs: &'static str,
    pub(crate) how: How,
}

/// The program that runs an experiment.
#[derive(Clone, Copy)]
pub(crate) enum How {
    /// `ferrite-lab`, on this machine.
    Here(fn(&Lab) -> Result<Findings>),
    /// `cargo xtask bench` with that part, on a real Xen host in the emulator.
    OnXen { part: &'static str },
}

impl How {
    /// The place, in the words of the results' files.
    pub(crate) fn place(self) -> &'static str {
        match self {
            How::Here(_) => report::WHERE,
            How::OnXen { .. } => findings::ON_XEN,
        }
    }
}

/// All experiments, in the order of the report.
pub(crate) fn all() -> impl Iterator<Item = &'static Experiment> {
    HERE.iter().chain(on_xen::EXPERIMENTS)
}

/// The experiments on this machine, in the order in which they run.
pub(crate) const HERE: &[Experiment] = &[
    request_size::EXPERIMENT,
    queue_length::EXPERIMENT,
    fragmentation::EXPERIMENT,
    metadata_cache::EXPERIMENT,
    store_cache::EXPERIMENT,
    multiqueue::EXPERIMENT,
    polling::EXPERIMENT,
    in_flight::EXPERIMENT,
    aggregate::EXPERIMENT,
    persistent::EXPERIMENT,
    peers::EXPERIMENT,
];

/// The experiment of that name.
pub(crate) fn find(name: &str) -> Option<&'static Experiment> {
    all().find(|experiment| experiment.name == name)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_experiment_says_in_sentences_what_it_is_about() {
        for (i, experiment) in all().enumerate() {
            let Experiment { name, shows, source, differs, .. } = experiment;
            let plain = |c: char| c.is_ascii_lowercase() || c == '-';
            assert!(name.chars().all(plain), "{name} is the name of a file");
            assert!(all().take(i).all(|other| other.name != *name), "{name} is there twice");
            for text in [shows, source, differs] {
                assert!(text.len() > 30 && text.ends_with('.'), "{name}: {text}");
            }
        }
    }
}
