//! The experiments of the published sources, each a file: what it shows, how it is run, and why our
//! figures are not theirs.

mod aggregate;
pub(crate) mod findings;
mod fragmentation;
mod in_flight;
pub(crate) mod lab;
mod metadata_cache;
mod multiqueue;
mod peers;
mod persistent;
mod polling;
mod queue_length;
mod request_size;

use anyhow::Result;
use findings::Findings;
use lab::Lab;

/// A published experiment that can be run here.
pub(crate) struct Experiment {
    pub(crate) name: &'static str,
    /// One sentence.
    pub(crate) shows: &'static str,
    /// Who has published it, and what came out.
    pub(crate) source: &'static str,
    /// Why our figures are not those of the source.
    pub(crate) differs: &'static str,
    pub(crate) run: fn(&Lab) -> Result<Findings>,
}

/// All of them, in the order in which they run.
pub(crate) const ALL: &[Experiment] = &[
    request_size::EXPERIMENT,
    queue_length::EXPERIMENT,
    fragmentation::EXPERIMENT,
    metadata_cache::EXPERIMENT,
    multiqueue::EXPERIMENT,
    polling::EXPERIMENT,
    in_flight::EXPERIMENT,
    aggregate::EXPERIMENT,
    persistent::EXPERIMENT,
    peers::EXPERIMENT,
];

/// The one of that name.
pub(crate) fn find(name: &str) -> Option<&'static Experiment> {
    ALL.iter().find(|experiment| experiment.name == name)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_experiment_says_in_sentences_what_it_is_about() {
        for (i, experiment) in ALL.iter().enumerate() {
            let Experiment { name, shows, source, differs, .. } = experiment;
            let plain = |c: char| c.is_ascii_lowercase() || c == '-';
            assert!(name.chars().all(plain), "{name} is the name of a file");
            assert!(ALL[..i].iter().all(|other| other.name != *name), "{name} is there twice");
            for text in [shows, source, differs] {
                assert!(text.len() > 30 && text.ends_with('.'), "{name}: {text}");
            }
        }
    }
}
