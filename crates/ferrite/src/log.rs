//! Log messages go to standard error; whoever emits them keeps their rate down.

use std::io;

use tracing_subscriber::EnvFilter;

use crate::cli::{Cli, Command};

/// Sets up logging, from `RUST_LOG` if it is set, else from the number of `-v` and the command: a
/// server tells what happens to it, others speak of trouble only.
pub(crate) fn set_up(cli: &Cli) {
    let default = match cli.verbose {
        0 if matches!(cli.command, Command::Serve(_)) => "warn,ferrite=info,ferrite_serve=info",
        0 => "warn",
        1 => "debug",
        _ => "trace",
    };
    let chosen = std::env::var("RUST_LOG").ok().filter(|text| !text.is_empty());
    let filter = EnvFilter::try_new(chosen.as_deref().unwrap_or(default));
    let understood = filter.is_ok();
    tracing_subscriber::fmt()
        .with_env_filter(filter.unwrap_or_else(|_| EnvFilter::new(default)))
        .with_writer(io::stderr)
        .init();
    if !understood {
        tracing::warn!(
            "RUST_LOG is not understood and ignored; an example: RUST_LOG=ferrite=debug"
        );
    }
}
