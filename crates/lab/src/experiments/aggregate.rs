//! Many guests and disks together: copied data compared with mapped pages.

use anyhow::Result;

use super::findings::{Chart, Findings, Row};
use super::lab::{Lab, Medium};
use super::{Experiment, How};
use crate::compare::result::Target;
use crate::compare::rounds::Plan;
use crate::statistics::ratios;

pub(super) const EXPERIMENT: Experiment = Experiment {
    name: "aggregate",
    shows: "What 1 to 10 guests get together by the size of their requests, with grant copy and with pages that are mapped, \
            copied and unmapped as tapdisk2 did.",
    source: "tapdisk3 (XenServer, 2014), 10 guests x 9 SSDs: tapdisk2 at most about 4 GB/s; tapdisk3 about 8 GB/s writing and \
             10 GB/s reading, up to +100 % and +150 %.",
    differs: "On the loopback to map is mmap, a page fault and munmap, and a copy is a memcpy: no hypercalls on either side, \
              and fewer processors than the source's two sockets, so mapping loses for its system calls alone.",
    how: How::Here(run),
};

const IMAGE_MIB: usize = 1024;
pub(crate) const GUESTS: [u32; 4] = [1, 2, 5, 10];
/// Disks of each of ten guests: a ring each, as with more guests.
const DISKS: [u32; 2] = [3, 9];
/// The bytes of one transfer of a guest.
pub(crate) const SIZES: [(u32, &str); 7] = [
    (512, "512 B"),
    (4096, "4 KiB"),
    (16384, "16 KiB"),
    (65536, "64 KiB"),
    (262_144, "256 KiB"),
    (MAX_REQUEST, "1 MiB"),
    (4 * MAX_REQUEST, "4 MiB"),
];
/// The largest request of a ring, with 256 indirect segments. Larger transfers become several concurrent requests.
pub(crate) const MAX_REQUEST: u32 = 1 << 20;
/// Sizes that are also used for writes, and with several disks.
const MIDDLE: [(u32, &str); 2] = [SIZES[1], SIZES[3]];
pub(crate) const MOVERS: [&str; 2] = ["copy", "map"];
pub(crate) const MIB_S: f64 = 1_048_576.0;

/// A point of the measured surface.
#[derive(Clone, Copy)]
pub(crate) struct Place {
    pub(crate) guests: u32,
    disks: u32,
    pub(crate) size: (u32, &'static str),
    mode: &'static str,
}

impl Place {
    /// Each guest reads its disk.
    pub(crate) fn reads(guests: u32, size: (u32, &'static str)) -> Place {
        Place { guests, disks: 1, size, mode: "read" }
    }

    fn name(self) -> String {
        let Place { guests, disks, size: (_, size), mode } = self;
        let disks = if disks == 1 { String::new() } else { format!(" x {disks} disks") };
        format!("{mode}, {guests} guests{disks}, {size}")
    }

    fn key(self, mover: &str) -> String {
        format!("{}, {mover}", self.name())
    }

    /// The bytes of a request of the ring.
    fn request(self) -> u32 {
        self.size.0.min(MAX_REQUEST)
    }

    /// At most 1 MiB of each disk in flight, and 32 requests; or one larger transfer.
    fn options(self, mover: &str) -> String {
        let (rings, request, bytes) = (self.guests * self.disks, self.request(), self.size.0);
        let (depth, batch) = match bytes / request {
            1 => ((MAX_REQUEST / bytes).clamp(1, 32), ""),
            pieces => (pieces, " --batch"),
        };
        let memory = bytes.max(MAX_REQUEST);
        format!(
            "--mode {} --guests {rings} --block {request} --depth {depth}{batch} --mover {mover} \
             --memory {memory} --force-overwrite",
            self.mode
        )
    }
}

fn run(lab: &Lab) -> Result<Findings> {
    let image = lab.image(Medium::Memory, IMAGE_MIB)?;
    let (guests, sizes) = (lab.some(&GUESTS), lab.some(&SIZES));
    let mut places = Vec::new();
    for size in &sizes {
        places.extend(guests.iter().map(|guests| Place::reads(*guests, *size)));
    }
    for size in MIDDLE {
        places.push(Place { guests: 10, disks: 1, size, mode: "write" });
        let disks = if lab.settings.quick { &[][..] } else { &DISKS };
        let more = |disks: &u32| Place { guests: 10, disks: *disks, size, mode: "read" };
        places.extend(disks.iter().map(more));
    }
    let mut plan = Plan::new("aggregate");
    for place in &places {
        for mover in MOVERS {
            plan = plan.add(place.key(mover), lab.bench(image.path(), place.options(mover)));
        }
    }
    let rounds = lab.measure(plan)?;
    let rates = |place: Place, mover: &str| {
        let bytes = f64::from(place.request());
        rounds.each(|r| r.of(&place.key(mover)).iops * bytes / MIB_S)
    };
    Ok(findings(&places, &guests, &sizes, &rates))
}

/// MiB/s at a point with a mover, a value per round.
type Rates<'a> = &'a dyn Fn(Place, &str) -> Vec<f64>;

/// The findings from the rates at these points, which include at least all of these guests and sizes.
pub(crate) fn findings(
    places: &[Place],
    guests: &[u32],
    sizes: &[(u32, &'static str)],
    rates: Rates<'_>,
) -> Findings {
    let mut charts = charts(rates, guests, sizes);
    charts.push(surface(rates, guests, sizes));
    let rows = places.iter().flat_map(|place| rows(rates, *place)).collect();
    Findings { rows, charts, ..Findings::default() }
}

fn rate(rates: Rates<'_>, place: Place, mover: &str) -> Row {
    Row::new(format!("{}: {mover}", place.name()), "MiB/s", &rates(place, mover))
}

fn over(rates: Rates<'_>, place: Place) -> Row {
    let over = ratios(&rates(place, "copy"), &rates(place, "map"));
    Row::new(format!("{}: copy over map", place.name()), "times", &over)
}

fn rows(rates: Rates<'_>, place: Place) -> Vec<Row> {
    let over = over(rates, place);
    let aimed = place.guests == 10 && place.disks == 1 && (4096..=65536).contains(&place.size.0);
    let over = if aimed { over.target(Target::AtLeast(1.5)) } else { over };
    let over = match (aimed, place.mode) {
        (true, "read") => over.published(2.5),
        (true, _) => over.published(2.0),
        _ => over,
    };
    vec![rate(rates, place, "copy"), rate(rates, place, "map"), over]
}

/// The gain of copies at each point.
fn surface(rates: Rates<'_>, guests: &[u32], sizes: &[(u32, &'static str)]) -> Chart {
    let chart = Chart::new("Reads together: copy over map", "bytes a request", "times").surface();
    guests.iter().fold(chart, |chart, guests| {
        let row = |size: &(u32, &'static str)| {
            let place = Place::reads(*guests, *size);
            (f64::from(size.0), over(rates, place))
        };
        let line: Vec<(f64, Row)> = sizes.iter().map(row).collect();
        chart.line(of_guests(*guests), line.iter().map(|(x, row)| (*x, row)))
    })
}

fn of_guests(guests: u32) -> String {
    if guests == 1 { "1 guest".into() } else { format!("{guests} guests") }
}

/// The rates as one chart per mover, with a line per number of guests.
fn charts(rates: Rates<'_>, guests: &[u32], sizes: &[(u32, &'static str)]) -> Vec<Chart> {
    let picture = |mover: &str| {
        let title = format!("Reads together: {mover}");
        guests.iter().fold(Chart::new(&title, "bytes a request", "MiB/s"), |chart, guests| {
            let row = |size: &(u32, &'static str)| {
                let place = Place::reads(*guests, *size);
                (f64::from(size.0), rate(rates, place, mover))
            };
            let line: Vec<(f64, Row)> = sizes.iter().map(row).collect();
            chart.line(of_guests(*guests), line.iter().map(|(x, row)| (*x, row)))
        })
    };
    MOVERS.iter().map(|mover| picture(mover)).collect()
}
