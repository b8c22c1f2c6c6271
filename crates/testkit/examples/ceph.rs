//! Starts a Ceph cluster at the address that is the only argument, prints its folder, and ends it when standard input ends.

use std::io;

use ferrite_testkit::ceph::Cluster;

fn main() -> io::Result<()> {
    let address = std::env::args().nth(1).unwrap_or_else(|| "127.0.0.1".into());
    let cluster = Cluster::start_at(&address);
    println!("{}", cluster.folder().display());
    io::copy(&mut io::stdin(), &mut io::sink()).map(drop)
}
