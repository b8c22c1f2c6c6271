//! The switch alone, on Xen: `ferrite net serve` without counters, for measurements of the packets' way.
//!
//! `switch KIND [TAP]`

use std::sync::Arc;

use ferrite_net::packet::Uplink;
use ferrite_net::tap::TapUplink;
use ferrite_net::{Network, Options};
use ferrite_xen::real::Xen;
use ferrite_xen::store::Store;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut words = std::env::args().skip(1);
    let kind = words.next().ok_or("switch KIND [TAP]")?;
    let mut options = Options::new(&kind, Arc::new(Xen::new()), Store::open()?);
    if let Some(tap) = words.next() {
        options.uplink = Some(Box::new(TapUplink::open(&tap)?) as Box<dyn Uplink>);
    }
    Ok(Network::start(options)?.wait()?)
}
