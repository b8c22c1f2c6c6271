//! `ferrite tunnel`: the process that speaks TLS for its parent (`ferrite_host::tunnel` starts it).

use std::fs::File;
use std::os::fd::{AsFd as _, OwnedFd};
use std::path::PathBuf;

use clap::{Args, Subcommand};
use ferrite_host::process::take_given;
use ferrite_host::sandbox::{Lockdown, Means, deny_names_and_calls};
use ferrite_host::tunnel::{
    CA, CLIENT_CERTIFICATE, CLIENT_FILES_FD, CLIENT_KEY, FIRST_FD, Files, INNER_FD, Inward,
};
use ferrite_tunnel::{Restriction, inward, outward, passed_client, passed_server};

use crate::exit::Failure;
use crate::signals;

/// `ferrite tunnel`.
#[derive(Debug, Args)]
pub(crate) struct TunnelArgs {
    #[command(subcommand)]
    direction: Direction,
}

/// The two directions.
#[derive(Debug, Subcommand)]
enum Direction {
    /// Clients come by TLS.
    In {
        /// Clients need no certificates.
        #[arg(long)]
        any_client: bool,
        /// Clients speak in clear.
        #[arg(long, conflicts_with = "any_client")]
        plain: bool,
        /// Clients get the export of this name. The server is told.
        #[arg(long, value_name = "NAME")]
        export: Option<String>,
        /// Clients may not change anything.
        #[arg(long, requires = "export")]
        read_only: bool,
        /// Clients are not told the name.
        #[arg(long, requires = "export")]
        no_list: bool,
        /// Clients have a certificate of one of these hosts.
        #[arg(long, requires = "export", value_name = "HOST")]
        peer: Vec<String>,
        #[command(flatten)]
        rights: RightsArgs,
    },
    /// A connection of storage motion gets the disk of a server. They are standard input and output.
    PassedServer {
        /// The handshake with options: the server's own.
        #[arg(long)]
        options: bool,
        #[command(flatten)]
        rights: RightsArgs,
    },
    /// A connection of storage motion is the target of a disk's mirror. It is standard input; standard output listens.
    PassedClient {
        #[command(flatten)]
        rights: RightsArgs,
    },
    /// A client goes by TLS to a server.
    Out {
        /// The name or address that the server's certificate must have.
        #[arg(long)]
        server: String,
        #[command(flatten)]
        rights: RightsArgs,
    },
}

/// The rest of root's rights.
#[derive(Debug, Args)]
struct RightsArgs {
    /// The user of this process alone. Without one it keeps the user of its starter.
    #[arg(long, requires = "root")]
    user: Option<u32>,

    /// A folder with nothing in it.
    #[arg(long, requires = "user")]
    root: Option<PathBuf>,
}

/// Speaks TLS until the parent ends, or the one client.
pub(crate) fn run(args: &TunnelArgs) -> Result<(), Failure> {
    // Ctrl-C and systemd tell all processes of an export to end. Its clients get their last answers by this one, which
    // ends with its parent.
    let _stop = signals::flag()?;
    match &args.direction {
        Direction::In { any_client, plain, export, read_only, no_list, peer, rights } => {
            let how = match plain {
                true => Inward::Plain,
                false => Inward::Tls { verifies: !any_client },
            };
            let restriction = export.as_ref().map(|name| Restriction {
                name: name.clone(),
                read_only: *read_only,
                hides_names: *no_list,
            });
            let starter = given(FIRST_FD)?;
            rights.give_up(Means { sockets_only: true, accepts: true, ..Means::default() })?;
            match inward(starter, how, restriction, peer.clone()) {
                Ok(never) => match never {},
                Err(e) => Err(cannot("serve clients by TLS", e)),
            }
        }
        Direction::PassedServer { options, rights } => {
            let (outside, inside) = standard()?;
            rights.give_up(Means { sockets_only: true, accepts: true, ..Means::default() })?;
            passed_server(&outside, &inside, *options)
                .map_err(|fault| Failure::new(fault.what, fault.why, fault.help))
        }
        Direction::PassedClient { rights } => {
            let (target, listener) = standard()?;
            rights.give_up(Means { sockets_only: true, accepts: true, ..Means::default() })?;
            passed_client(target, listener)
                .map_err(|fault| Failure::new(fault.what, fault.why, fault.help))
        }
        Direction::Out { server, rights } => {
            let (outside, inside) = (given(FIRST_FD)?, given(INNER_FD)?);
            let names = [CA, CLIENT_CERTIFICATE, CLIENT_KEY].into_iter().zip(CLIENT_FILES_FD);
            let files =
                names.filter_map(|(name, fd)| Some((name, File::from(take_given(fd).ok()?))));
            let files = Files::of(files.collect());
            rights.give_up(Means { sockets_only: true, accepts: true, ..Means::default() })?;
            outward(server, &outside, &inside, &files)
                .map_err(|fault| Failure::new(fault.what, fault.why, fault.help))
        }
    }
}

/// The two sockets of a process that was started by name: one that outlives its starter.
fn standard() -> Result<(OwnedFd, OwnedFd), Failure> {
    let outside = std::io::stdin().as_fd().try_clone_to_owned();
    let inside = std::io::stdout().as_fd().try_clone_to_owned();
    outside.and_then(|outside| Ok((outside, inside?))).map_err(|e| cannot("take its sockets", e))
}

impl RightsArgs {
    /// Gives up all rights but those to open sockets and files, for good.
    fn give_up(&self, means: Means) -> Result<(), Failure> {
        let lacking = match (self.user, &self.root) {
            (Some(user), Some(root)) => Lockdown { user, root: root.clone(), means }.enter(),
            _ => deny_names_and_calls(&means),
        };
        let lacking = lacking.map_err(|e| cannot("give up the rights of this process", e))?;
        if !lacking.is_empty() {
            tracing::debug!("this kernel lacks: {lacking}");
        }
        Ok(())
    }
}

fn given(number: i32) -> Result<OwnedFd, Failure> {
    take_given(number).map_err(|e| cannot("be a tunnel", e))
}

fn cannot(what: &str, why: impl std::fmt::Display) -> Failure {
    let help = "other commands start it: ferrite export nbd --listen ADDRESS:PORT --tls DIR";
    Failure::new(format!("cannot {what}"), why, help)
}
