//! The instructions of an I/O by function: the emulator counts every block of code, and the counts are attributed to
//! guest, hypervisor and dom0, and to their functions. The guest itself marks the times of the counts, so that only its
//! work and the consequences are between two marks.

use anyhow::{Context, Result, bail};
use ferrite_xenhost::XenHost;
use ferrite_xenhost::guest::Guest;
use ferrite_xenhost::steps::{self, output, run_logged};
use std::collections::{BTreeMap, HashMap};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

/// The addresses of Linux and Xen; lower ones are user space.
const XEN: std::ops::Range<u64> = 0xffff_8000_0000_0000..0xffff_8800_0000_0000;
const KERNEL: u64 = 0xffff_ffff_8000_0000;
const MODULES: u64 = 0xffff_ffff_c000_0000;
/// The number of functions in a report.
const TOP: usize = 40;
/// How long the emulator may take to notice a request, and to write its counters.
const WRITE_LIMIT: Duration = Duration::from_secs(60);
/// The guest's mark is a call of this kernel function: no program sets a host name by chance.
const MARK: &str = "__x64_sys_sethostname";
/// A shell command that sets the mark in the guest.
pub(in crate::compare) const MARK_NOW: &str = "hostname mark";
/// Functions whose calls are counted, besides all system calls of Linux.
const CALLS: &[&str] = &[
    "svm_vmexit_handler",
    "hvm_hypercall",
    "pv_hypercall",
    "do_event_channel_op",
    "do_grant_table_op",
    "do_sched_op",
    "context_switch",
    "xen_hypercall_pv",
    "xen_hypercall_amd",
    "xen_evtchn_do_upcall",
    "__xen_evtchn_do_upcall",
    "sysvec_xen_hvm_callback",
    "blkif_interrupt [xen_blkfront]",
    "evtchn_interrupt [xen_evtchn]",
];
/// The prefix of Linux' system calls.
const SYSTEM_CALL: &str = "__x64_sys_";
/// Rarer calls are left out.
const LEAST_CALLS: f64 = 0.01;

/// A block of code: its address, and the address of its page in the emulator's memory.
type Place = (u64, u64);
/// The counts of each block.
pub(in crate::compare) type Counts = HashMap<Place, Count>;

/// The executions of a block.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(in crate::compare) struct Count {
    instructions: i64,
    /// How often it was entered at its beginning.
    entries: i64,
}

/// Functions by their addresses, ascending.
#[derive(Default)]
struct Symbols(Vec<(u64, String)>);

impl Symbols {
    /// Parses lines of `ADDRESS KIND NAME [MODULE]`, as nm and kallsyms write them.
    fn parse(text: &str, kinds: &str) -> Symbols {
        let mut list: Vec<(u64, String)> = text
            .lines()
            .filter_map(|line| {
                let mut words = line.splitn(3, ' ');
                let address = u64::from_str_radix(words.next()?, 16).ok()?;
                let kind = words.next()?;
                let name = words.next()?.replace('\t', " ");
                kinds.contains(kind).then_some((address, name))
            })
            .collect();
        list.sort_by_key(|symbol| symbol.0);
        Symbols(list)
    }

    fn at(&self, address: u64) -> &str {
        match self.0.partition_point(|symbol| symbol.0 <= address) {
            0 => "?",
            after => &self.0[after - 1].1,
        }
    }

    /// Whether a function begins at that address.
    fn begins(&self, address: u64) -> bool {
        self.0.binary_search_by_key(&address, |symbol| symbol.0).is_ok()
    }

    fn address(&self, name: &str) -> Option<u64> {
        self.0.iter().find(|symbol| symbol.1 == name).map(|symbol| symbol.0)
    }
}

/// A mapping of the backend's process: addresses, offset in its file, the file.
struct Mapping {
    addresses: std::ops::Range<u64>,
    offset: u64,
    file: String,
}

fn mappings(maps: &str) -> Vec<Mapping> {
    let parse = |line: &str| {
        let words: Vec<&str> = line.split_whitespace().collect();
        let (from, to) = words.first()?.split_once('-')?;
        let number = |text: &str| u64::from_str_radix(text, 16).ok();
        Some(Mapping {
            addresses: number(from)?..number(to)?,
            offset: number(words.get(2)?)?,
            file: words.get(5)?.rsplit('/').next()?.to_owned(),
        })
    };
    maps.lines().filter_map(parse).collect()
}

/// The functions that tell dom0 from guests.
pub(in crate::compare) struct Apart {
    /// Functions that only dom0 runs. One of them is enough.
    pub(in crate::compare) dom0: &'static [&'static str],
    /// A function that each guest runs, and dom0 does not.
    pub(in crate::compare) guest: &'static str,
}

/// Counts the instructions of one host.
pub(in crate::compare) struct Profiler {
    plugin: PathBuf,
    request: PathBuf,
    dir: PathBuf,
    apart: Apart,
    ferrite: Symbols,
    dom0: Symbols,
    guest: Symbols,
    xen: Symbols,
    /// The number of marks that were read.
    marks: u32,
}

impl Profiler {
    /// Builds the emulator's plugin; `ferrite` is the serving program.
    pub(in crate::compare) fn new(ferrite: &Path, apart: Apart) -> Result<Profiler> {
        let dir = steps::target_dir().join("bench").join("profile");
        std::fs::create_dir_all(&dir).with_context(|| format!("cannot make {}", dir.display()))?;
        let dir = dir.canonicalize()?;
        let (source, plugin) = (dir.join("profile.c"), dir.join("profile.so"));
        std::fs::write(&source, include_str!("../scripts/profile.c"))?;
        let mut cc = Command::new("cc");
        cc.args(["-O2", "-shared", "-fPIC", "-o"]).arg(&plugin).arg(&source);
        run_logged(&mut cc, &dir.join("cc.log")).context("cannot build the emulator's plugin")?;
        let request = dir.join("request");
        let _ = std::fs::remove_file(&request);
        let names = output(Command::new("nm").args(["-C", "--defined-only"]).arg(ferrite))?;
        let ferrite = Symbols::parse(&names, "tTwW");
        Ok(Profiler {
            plugin,
            request,
            dir,
            apart,
            ferrite,
            dom0: Symbols::default(),
            guest: Symbols::default(),
            xen: Symbols::default(),
            marks: 0,
        })
    }

    /// The emulator's arguments that load the plugin.
    pub(in crate::compare) fn arguments(&self) -> Vec<String> {
        let plugin = format!("{},request={}", self.plugin.display(), self.request.display());
        vec!["-plugin".into(), plugin]
    }

    /// Reads the functions of the kernels and of Xen. From then on the guest's marks count.
    pub(in crate::compare) fn read_symbols(
        &mut self,
        xenhost: &mut XenHost,
        guest: &mut Guest,
    ) -> Result<()> {
        self.dom0 = Symbols::parse(&xenhost.sh("cat /proc/kallsyms")?, "tTwW");
        // Both kernels are the same; their modules have different addresses.
        let modules = guest.sh(xenhost, "grep '\\[' /proc/kallsyms", 60)?;
        self.guest = Symbols::parse(&modules, "tTwW");
        self.xen = Symbols::parse(&xenhost.sh("cat /proc/xen/xensyms")?, "tT");
        let mark = self.dom0.address(MARK).with_context(|| format!("no function {MARK}"))?;
        let asked = self.dir.join("request.new");
        std::fs::write(&asked, format!("{mark:x} {}\n", self.dir.join("counters").display()))?;
        std::fs::rename(&asked, &self.request)?;
        wait("the emulator does not look for requests", || !self.request.exists())
    }

    /// All counters at the guest's next mark.
    pub(in crate::compare) fn counters(&mut self) -> Result<Counts> {
        let file = self.dir.join(format!("counters.{}", self.marks));
        self.marks += 1;
        wait("the emulator does not write its counters", || file.exists())?;
        let mut counts = Counts::new();
        for record in std::fs::read(&file)?.chunks_exact(32) {
            let number = |at: usize| {
                let bytes = record[at..at + 8].try_into().unwrap_or_default();
                u64::from_le_bytes(bytes)
            };
            let (length, instructions) = (number(16).max(1), number(24));
            let count = counts.entry((number(0), number(8))).or_default();
            count.instructions += instructions as i64;
            count.entries += (instructions / length) as i64;
        }
        std::fs::remove_file(&file)?;
        Ok(counts)
    }

    /// The report on `counts`, which `ios` requests took. `maps` are the mappings of the backend's process.
    pub(in crate::compare) fn report(
        &self,
        title: &str,
        counts: &Counts,
        ios: f64,
        maps: &str,
    ) -> String {
        let Some(in_dom0) = self.divide(counts) else {
            return format!("### {title}\n\nNothing that could be told apart.\n");
        };
        let maps = mappings(maps);
        let mut owners: HashMap<&str, i64> = HashMap::new();
        let mut functions: HashMap<(&str, String), i64> = HashMap::new();
        let mut calls: BTreeMap<(&str, String), i64> = BTreeMap::new();
        for (place, count) in counts {
            let (owner, function) = self.attribute(*place, in_dom0(place.1), &maps);
            let counted = CALLS.contains(&&*function) || function.starts_with(SYSTEM_CALL);
            if counted && self.begins(place.0) {
                *calls.entry((owner, function.clone())).or_default() += count.entries;
            }
            *owners.entry(owner).or_default() += count.instructions;
            *functions.entry((owner, function)).or_default() += count.instructions;
        }
        let all: i64 = owners.values().sum();
        let mut text = format!(
            "### {title}\n\n{:.0} instructions a request\n\n| instructions | part | whose |\n|---|---|---|\n",
            all as f64 / ios
        );
        let mut owners: Vec<_> = owners.into_iter().collect();
        owners.sort_by_key(|(_, count)| -count);
        for (owner, count) in owners {
            let part = 100.0 * count as f64 / all as f64;
            text += &format!("| {:.0} | {part:.1} % | {owner} |\n", count as f64 / ios);
        }
        text += "\n| calls | whose | function |\n|---|---|---|\n";
        for ((owner, function), count) in calls {
            let calls = count as f64 / ios;
            if calls >= LEAST_CALLS {
                text += &format!("| {calls:.2} | {owner} | `{function}` |\n");
            }
        }
        text += "\n| instructions | whose | function |\n|---|---|---|\n";
        let mut functions: Vec<_> = functions.into_iter().collect();
        functions.sort_by_key(|(_, count)| -count);
        for ((owner, function), count) in functions.into_iter().take(TOP) {
            text += &format!("| {:.0} | {owner} | `{function}` |\n", count as f64 / ios);
        }
        text
    }

    /// Separates dom0's memory from the guests'. Both are far apart in the emulator's memory. They are divided at the
    /// widest gap between a function that only dom0 runs and one that only a guest runs: the guest that is nearest.
    fn divide(&self, counts: &Counts) -> Option<impl Fn(u64) -> bool + use<>> {
        let places = |symbols: &Symbols, name: &str| {
            let start = symbols.address(name)?;
            let found = counts.iter().filter(move |((address, _), count)| {
                count.instructions > 0 && (start..start + 0x200).contains(address)
            });
            Some(found.map(|((_, place), _)| *place).collect::<Vec<_>>())
        };
        let dom0 = self.apart.dom0.iter().filter_map(|name| places(&self.dom0, name));
        let dom0 = dom0.flatten().next()?;
        let guests = places(&self.guest, self.apart.guest)?;
        let guest = guests.into_iter().min_by_key(|place| place.abs_diff(dom0))?;
        let between = dom0.min(guest)..=dom0.max(guest);
        let mut places: Vec<u64> = counts
            .iter()
            .filter(|((address, place), count)| {
                count.instructions > 0 && !XEN.contains(address) && between.contains(place)
            })
            .map(|((_, place), _)| *place)
            .collect();
        places.sort_unstable();
        let gap = places.windows(2).max_by_key(|pair| pair[1] - pair[0])?;
        let limit = gap[1];
        Some(move |place: u64| (place >= limit) == (dom0 >= limit))
    }

    /// Whether a function of a kernel or of Xen begins at that address.
    fn begins(&self, address: u64) -> bool {
        [&self.xen, &self.dom0, &self.guest].iter().any(|symbols| symbols.begins(address))
    }

    /// The owner of a block, and its function.
    fn attribute(
        &self,
        (address, _): Place,
        in_dom0: bool,
        maps: &[Mapping],
    ) -> (&'static str, String) {
        if XEN.contains(&address) {
            return ("Xen", self.xen.at(address).to_owned());
        }
        if address >= KERNEL {
            let symbols = if in_dom0 || address < MODULES { &self.dom0 } else { &self.guest };
            let owner = if in_dom0 { "dom0's kernel" } else { "guest's kernel" };
            return (owner, symbols.at(address).to_owned());
        }
        if !in_dom0 {
            return ("guest's user space", "fio".into());
        }
        let owner = "dom0's user space";
        let Some(mapping) = maps.iter().find(|mapping| mapping.addresses.contains(&address)) else {
            return (owner, "others".into());
        };
        if mapping.file != "ferrite" {
            return (owner, mapping.file.clone());
        }
        let same_file = maps.iter().filter(|other| other.file == mapping.file);
        let base = same_file.map(|other| other.addresses.start - other.offset).min().unwrap_or(0);
        (owner, self.ferrite.at(address - base).to_owned())
    }
}

/// Waits for an action of the emulator.
fn wait(what: &str, done: impl Fn() -> bool) -> Result<()> {
    let deadline = Instant::now() + WRITE_LIMIT;
    while !done() {
        if Instant::now() > deadline {
            bail!("{what}");
        }
        std::thread::sleep(Duration::from_millis(20));
    }
    Ok(())
}

/// The increase of the counts from `before` to `after`.
pub(in crate::compare) fn difference(after: &Counts, before: &Counts) -> Counts {
    let mut counts = after.clone();
    for (place, count) in before {
        let left = counts.entry(*place).or_default();
        left.instructions -= count.instructions;
        left.entries -= count.entries;
    }
    counts.retain(|_, count| *count != Count::default());
    counts
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_address_belongs_to_the_function_before_it() {
        let text = "ffffffff81000000 T first\nffffffff81000100 t second\t[brd]\nff d data\n";
        let symbols = Symbols::parse(text, "tT");
        assert_eq!(symbols.at(0xffff_ffff_8100_00ff), "first");
        assert_eq!(symbols.at(0xffff_ffff_8100_0100), "second [brd]");
        assert_eq!(symbols.at(0), "?");
        assert_eq!(symbols.address("second [brd]"), Some(0xffff_ffff_8100_0100));
    }

    #[test]
    fn a_difference_holds_what_has_changed() {
        let count = |instructions, entries| Count { instructions, entries };
        let before = Counts::from([((1, 1), count(5, 1)), ((2, 1), count(14, 2))]);
        let after =
            Counts::from([((1, 1), count(5, 1)), ((2, 1), count(28, 4)), ((3, 1), count(1, 1))]);
        let changed = Counts::from([((2, 1), count(14, 2)), ((3, 1), count(1, 1))]);
        assert_eq!(difference(&after, &before), changed);
    }

    #[test]
    fn a_mapping_without_a_file_is_left_out() {
        let maps = "1000-2000 r-xp 00001000 fd:00 12 /lab/bin/ferrite\n3000-4000 rw-p 0 00:00 0\n";
        let maps = mappings(maps);
        assert_eq!(maps.len(), 1);
        assert_eq!((maps[0].offset, maps[0].file.as_str()), (0x1000, "ferrite"));
    }
}
