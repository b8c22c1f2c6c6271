//! `ferrite-sim`: runs stories of disks on a machine whose power fails, and reports failed ones.
#![forbid(unsafe_code)]

use std::path::PathBuf;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use clap::Parser;
use ferrite_disk::Format as DiskFormat;
use ferrite_host::clock::{Random, SplitMix64};
use ferrite_sim::images::{Images, Medium};
use ferrite_sim::model::After;
use ferrite_sim::paths::{self, Paths};
use ferrite_sim::plan::{Cut, Plan, Scenario, Told, Violation};
use ferrite_sim::{stores, story};
use ferrite_simio::Lie;

/// Cuts the power of a simulated machine while it uses virtual disks.
///
/// The same seed gives exactly the same story. Exit code 1: a disk had content that is not allowed.
#[derive(Parser)]
#[command(name = "ferrite-sim", version)]
struct Arguments {
    /// The first story's seed; the next ones count up from it. Default: a random one.
    #[arg(long)]
    seed: Option<u64>,
    /// Run stories for so many seconds.
    #[arg(long, value_name = "S")]
    seconds: Option<u64>,
    /// Run a story of each kind for so many seeds.
    #[arg(long, value_name = "N", default_value_t = 1, conflicts_with = "seconds")]
    seeds: u64,
    /// mixed, first-writes, bitmaps, flush-storm, discards, zeroes, close, compressed, past, full,
    /// operations, failures, emptied, growth, chains; or all.
    #[arg(long, default_value = "all", value_name = "NAME", value_parser = scenarios)]
    scenario: Scenarios,
    /// raw, vhd, qcow2, store; or all.
    #[arg(long, default_value = "all", value_name = "FORMAT", value_parser = ["all", "raw", "vhd", "qcow2", "store"])]
    format: String,
    /// The medium of images: file, device; or all.
    #[arg(long, default_value = "all", value_name = "MEDIUM", value_parser = ["all", "file", "device"])]
    medium: String,
    /// Blocks or clusters of this size, in bytes, instead of the seed's choice.
    #[arg(long, value_name = "BYTES")]
    unit: Option<u32>,
    /// Run each story once for each step of each of its rounds and for each kind of end.
    #[arg(long)]
    steps: bool,
    /// As --steps, but only for steps that belong to a rare path.
    #[arg(long, conflicts_with_all = ["steps", "cut"])]
    rare_steps: bool,
    /// End this round, and the story, at this step in this way: the numbers of a report, and power or death.
    #[arg(long, value_name = "ROUND:STEP:KIND", value_parser = cut, conflicts_with = "steps")]
    cut: Option<Cut>,
    /// Print every request that touches this sector.
    #[arg(long, value_name = "SECTOR")]
    trace: Option<u64>,
    /// The medium ignores syncs, which the story must find: WHICH:OF, from 0:1, which is each.
    #[arg(long, value_name = "WHICH:OF", value_parser = lie)]
    lie: Option<Lie>,
    /// Keep the files of a failed story in this folder.
    #[arg(long, value_name = "DIR")]
    keep: Option<PathBuf>,
}

#[derive(Clone)]
struct Scenarios(Vec<Scenario>);

fn scenarios(name: &str) -> Result<Scenarios, String> {
    let found = Scenario::ALL.into_iter().filter(|s| name == "all" || s.name() == name);
    let found: Vec<Scenario> = found.collect();
    if found.is_empty() { Err("there is no such scenario".into()) } else { Ok(Scenarios(found)) }
}

fn cut(text: &str) -> Result<Cut, String> {
    let parts: Vec<&str> = text.split(':').collect();
    let [round, step, kind] = parts[..] else {
        return Err("it is ROUND:STEP:power or ROUND:STEP:death".into());
    };
    let number = |name: &str, text: &str| text.parse().map_err(|e| format!("the {name}: {e}"));
    let after = match kind {
        "power" => After::PowerCut,
        "death" => After::Death,
        _ => return Err("the kind is power or death".into()),
    };
    Ok(Cut { round: number("round", round)?, step: number("step", step)?, after })
}

fn lie(text: &str) -> Result<Lie, String> {
    let (which, of) = text.split_once(':').ok_or("it is WHICH:OF")?;
    let number = |text: &str| text.parse::<u64>().map_err(|e| e.to_string());
    let (which, of) = (number(which)?, number(of)?);
    if which < of { Ok(Lie::Sync { of, which }) } else { Err("WHICH is less than OF".into()) }
}

/// The totals of all stories so far.
#[derive(Default)]
struct Sum {
    stories: u64,
    told: Told,
}

impl Sum {
    fn add(&mut self, told: Told) {
        self.stories += 1;
        self.told.steps += told.steps;
        self.told.cuts += told.cuts;
        self.told.deaths += told.deaths;
        self.told.closes += told.closes;
        self.told.paths.add(&told.paths);
    }
}

fn main() -> ExitCode {
    let arguments = Arguments::parse();
    let seed = arguments.seed.unwrap_or_else(|| SplitMix64::from_system().next_u64() >> 16);
    println!("seed {seed}");
    paths::count();
    let (began, mut sum) = (Instant::now(), Sum::default());
    let result = stories(&arguments, seed, began, &mut sum);
    let Told { steps, cuts, deaths, closes, .. } = sum.told;
    println!(
        "{} stories in {:.1} s: {steps} steps, {cuts} power cuts, {deaths} deaths of the process, \
         {closes} closes",
        sum.stories,
        began.elapsed().as_secs_f64()
    );
    let cut =
        if arguments.steps || arguments.rare_steps { "paths cut at each step" } else { "paths" };
    println!("{cut}: {}", sum.told.paths);
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(violation) => {
            println!("{violation}");
            ExitCode::FAILURE
        }
    }
}

fn stories(
    arguments: &Arguments,
    first: u64,
    began: Instant,
    sum: &mut Sum,
) -> Result<(), Box<Violation>> {
    let limit = arguments.seconds.map(Duration::from_secs);
    let end = limit.map_or(first.saturating_add(arguments.seeds), |_| u64::MAX);
    for seed in first..end {
        for scenario in &arguments.scenario.0 {
            let keep = arguments.keep.clone();
            let (cut, trace) = (arguments.cut, arguments.trace);
            let plan =
                Plan { cut, keep, trace, lie: arguments.lie.clone(), ..Plan::new(seed, *scenario) };
            for images in images(arguments) {
                told(arguments, &plan, sum, &|plan| story::tell(&images, plan))?;
            }
            for medium in stores(arguments, *scenario) {
                told(arguments, &plan, sum, &|plan| stores::tell(medium, plan))?;
            }
            if limit.is_some_and(|limit| began.elapsed() >= limit) {
                return Ok(());
            }
        }
    }
    Ok(())
}

fn is(said: &str, name: &str) -> bool {
    said == "all" || said == name
}

fn media(arguments: &Arguments) -> impl Iterator<Item = Medium> + Clone + '_ {
    let media = [("file", Medium::Files), ("device", Medium::Devices)];
    media.into_iter().filter(|(name, _)| is(&arguments.medium, name)).map(|(_, medium)| medium)
}

/// The media of stores, if stories of stores are run.
fn stores(arguments: &Arguments, scenario: Scenario) -> impl Iterator<Item = Medium> + '_ {
    let are_told = is(&arguments.format, "store") && stores::SCENARIOS.contains(&scenario);
    media(arguments).filter(move |_| are_told)
}

fn images(arguments: &Arguments) -> impl Iterator<Item = Images> + '_ {
    let formats = DiskFormat::ALL.into_iter().filter(move |f| is(&arguments.format, f.name()));
    let all = formats.flat_map(move |f| media(arguments).map(move |m| Images::new(f).on(m)));
    all.map(|images| arguments.unit.map_or(images, |unit| images.in_units(unit)))
}

/// Runs a story.
type Tell<'a> = &'a dyn Fn(&Plan) -> Result<Told, Box<Violation>>;

fn told(
    arguments: &Arguments,
    plan: &Plan,
    sum: &mut Sum,
    tell: Tell<'_>,
) -> Result<(), Box<Violation>> {
    if !arguments.steps && !arguments.rare_steps {
        let told = tell(plan)?;
        if let (Some(cut), None) = (plan.cut, &told.cut_round) {
            println!("the story of seed {} has no round {}", plan.seed, cut.round);
        }
        sum.add(told);
        return Ok(());
    }
    let mut tell_cut = |round, step, after| -> Result<_, Box<Violation>> {
        let cut = Some(Cut { round, step, after });
        let mut told = tell(&Plan { cut, ..plan.clone() })?;
        let (cut_round, paths) = (told.cut_round.clone(), told.paths.clone());
        // A path counts once, however many of its steps are cut.
        if step != u64::MAX {
            told.paths = Paths::default();
        }
        sum.add(told);
        Ok(cut_round.map(|steps| (steps, paths)))
    };
    for round in 0.. {
        // The whole round, without a cut.
        let Some((steps, paths)) = tell_cut(round, u64::MAX, After::Death)? else { break };
        for step in steps.filter(|step| arguments.steps || paths.have(*step)) {
            for after in [After::PowerCut, After::Death] {
                tell_cut(round, step, after)?;
            }
        }
    }
    Ok(())
}
