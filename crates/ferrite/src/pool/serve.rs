//! `ferrite pool serve`: a server of a pool.

use std::net::TcpListener;
use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};
use std::path::PathBuf;
use std::time::Duration;

use clap::Args;
use ferrite_host::clock::{Clock as _, SystemClock};
use ferrite_host::frames::CLIENT_CHANNEL;
use ferrite_host::limited;
use ferrite_host::log_limit::SharedLogLimit;
use ferrite_host::sandbox::change_only;
use ferrite_member::Server;
use ferrite_serve::waker::Waker;
use rustix::event::{PollFd, PollFlags, poll};
use rustix::io::Errno;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

use super::announce::{Announced, Announcement};
use super::args::PoolArgs;
use crate::exit::{Code, Failure};
use crate::export::network::{self, Clients, NetworkArgs};
use crate::serve::stop_on_signals;

/// The help behind the options.
pub(super) const HELP: &str = "The first start makes DIR, which has to be empty, the folder of this server. Each copy is \
                               a raw image in it. With --etcd the server tells the pool that it runs.";
/// The pause before the next look for connections after a failure.
const PAUSE: Duration = Duration::from_millis(100);

/// The server.
#[derive(Debug, Args)]
pub(crate) struct ServeArgs {
    /// The folder of the copies.
    dir: PathBuf,
    /// The server's name in its pool.
    #[arg(long)]
    name: String,
    /// The pool's identifier: 32 hexadecimal digits.
    #[arg(long, value_parser = identifier)]
    pool: PoolId,
    #[command(flatten)]
    network: NetworkArgs,
    /// The address and port that the hosts of the pool use, if it is not that of --listen.
    #[arg(long, value_name = "ADDRESS:PORT")]
    address: Option<String>,
}

#[derive(Clone, Copy, Debug)]
struct PoolId([u8; 16]);

fn identifier(text: &str) -> Result<PoolId, String> {
    let number = u128::from_str_radix(text, 16).ok().filter(|_| text.len() == 32);
    let is_plain = text.bytes().all(|b| b.is_ascii_digit() || (b'a'..=b'f').contains(&b));
    match number.filter(|_| is_plain) {
        Some(number) => Ok(PoolId(number.to_be_bytes())),
        None => Err("a pool's identifier has 32 digits 0-9 and a-f".to_owned()),
    }
}

/// Serves until a signal comes.
pub(super) fn run(of: &PoolArgs, args: &ServeArgs) -> Result<(), Failure> {
    keep_to(args)?;
    let stop = stop_on_signals()?;
    raise_files();
    let PoolId(pool) = args.pool;
    let server = Server::new(&args.dir, pool, &args.name)
        .map_err(|fault| Failure::new(fault.what, fault.why, fault.help))?;
    let network = network::listen(&args.network)?.ok_or_else(|| {
        let help = "give --listen ADDRESS:PORT, and --tls DIR or --plain";
        Failure::new("cannot serve a pool", "no address is given", help).with_code(Code::USAGE)
    })?;
    let place = network.places.first().and_then(|place| place.split(' ').next());
    let place = place.unwrap_or_default().to_owned();
    let announced = match of.etcd.is_empty() {
        true => None,
        false => Some(Announced::start(Announcement {
            endpoints: of.etcd.clone(),
            tls: of.etcd_tls.clone(),
            plain: of.etcd_plain,
            pool,
            name: args.name.clone(),
            address: args.address.clone().unwrap_or_else(|| place.clone()),
            server: server.clone(),
        })?),
    };
    println!("ready: {place}");
    serve(&server, &network.clients, &stop);
    // The key is removed first, so that no owner connects here. Requests under way end with the process.
    drop(announced);
    Ok(())
}

/// Gives up the right to change other files. Before the first thread.
fn keep_to(args: &ServeArgs) -> Result<(), Failure> {
    let kept = network::make_root(&args.network).and_then(|()| change_only(&args.dir));
    let lacking = kept.map_err(|e| {
        let what = format!("cannot serve {}", args.dir.display());
        Failure::new(what, e, "make the folder, or correct its name")
    })?;
    if !lacking.is_empty() {
        tracing::info!("this server may change files outside of its folder: {lacking}");
    }
    Ok(())
}

/// Takes connections until the stop.
fn serve(server: &Server, clients: &Clients, stop: &Waker) {
    let limit = SharedLogLimit::default();
    let mut fds: Vec<BorrowedFd<'_>> = match clients {
        Clients::Plain(listeners) => listeners.iter().map(|listener| listener.as_fd()).collect(),
        Clients::Tls(tunnel) => vec![tunnel.channel.as_fd()],
    };
    fds.push(stop.fd());
    loop {
        let mut polled: Vec<_> =
            fds.iter().map(|fd| PollFd::from_borrowed_fd(*fd, PollFlags::IN)).collect();
        if let Err(e) = poll(&mut polled, None) {
            if e != Errno::INTR {
                limited!(warn, limit, SystemClock.now_ns(), "cannot wait for connections: {e}");
                std::thread::sleep(PAUSE);
            }
            continue;
        }
        let mut ready: Vec<_> = polled.iter().map(|fd| !fd.revents().is_empty()).collect();
        if ready.pop() == Some(true) {
            return;
        }
        for (i, _) in ready.into_iter().enumerate().filter(|(_, ready)| *ready) {
            match take(clients, i) {
                Ok(Some((socket, peer))) => server.connect(socket, peer),
                Ok(None) => {}
                Err(e) => {
                    limited!(
                        warn,
                        limit,
                        SystemClock.now_ns(),
                        "no connection can be taken now: {e}"
                    );
                    std::thread::sleep(PAUSE);
                }
            }
        }
    }
}

/// The next connection, and a description of its client.
fn take(clients: &Clients, i: usize) -> std::io::Result<Option<(OwnedFd, String)>> {
    match clients {
        Clients::Plain(listeners) => accept(&listeners[i]),
        Clients::Tls(tunnel) => {
            let frame = CLIENT_CHANNEL.try_receive(&tunnel.channel)?;
            let socket = frame.and_then(|frame| frame.files.into_iter().next());
            Ok(socket.map(|socket| (socket, "an owner by TLS".to_owned())))
        }
    }
}

fn accept(listener: &TcpListener) -> std::io::Result<Option<(OwnedFd, String)>> {
    match listener.accept() {
        Ok((stream, peer)) => {
            // Answers are small and must not wait for each other.
            stream.set_nodelay(true)?;
            stream.set_nonblocking(false)?;
            Ok(Some((stream.into(), format!("owner {peer}"))))
        }
        Err(e) => match Errno::from_io_error(&e) {
            Some(Errno::AGAIN | Errno::CONNABORTED | Errno::INTR) => Ok(None),
            _ => Err(e),
        },
    }
}

/// Each copy has two open files, and each connection one.
fn raise_files() {
    let limit = getrlimit(Resource::Nofile);
    // Without it fewer copies can be open, and opening says so.
    let _ = setrlimit(Resource::Nofile, Rlimit { current: limit.maximum, ..limit });
}
