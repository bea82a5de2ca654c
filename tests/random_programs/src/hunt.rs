//! Draws cases for a time, in several threads, and reports findings.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::path::PathBuf;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use slabwise_compiler::reference::Precision;

use crate::case::Case;
use crate::draw;
use crate::judge::{Counts, Fault, Finding, Plant, judge_planted};
use crate::print::{Claim, test};
use crate::rng::{Rng, mixed};
use crate::run::{Witness, execute, reference};
use crate::setup::Setup;
use crate::shrink::{Trial, shrink};

/// The time limit of a case, in seconds: processor time of its thread where the system reports it,
/// else wall time. Cases that wait for ever are ended by wall time.
const CASE_MAX: f64 = 20.0;
const WAIT_MAX: f64 = 120.0;
/// The time limit for shrinking a finding.
const SHRINK_MAX: Duration = Duration::from_secs(20);
/// Bytes of a worker's stack.
const STACK: usize = 64 << 20;

/// Options of a hunt.
#[derive(Clone, Debug)]
pub struct Hunt {
    /// The seed of all cases.
    pub seed: u64,
    /// The time limit, if any.
    pub seconds: Option<f64>,
    /// The limit of cases, if any.
    pub graphs: Option<u64>,
    /// Threads that draw and judge.
    pub threads: usize,
    /// Most statements of a case, about.
    pub max_size: usize,
    /// A file that always holds the seeds of the running cases, in case one ends the process.
    pub trail: Option<PathBuf>,
    /// Whether progress is printed.
    pub loud: bool,
}

/// A finding, shrunk.
#[derive(Clone, Debug)]
pub struct Report {
    /// The seed of the case as it was drawn.
    pub seed: u64,
    /// The number of similar findings.
    pub times: u64,
    /// The fault.
    pub finding: Finding,
    /// The smallest case with the fault.
    pub trial: Trial,
    /// That case as a test.
    pub program: String,
}

/// The results of a hunt.
#[derive(Clone, Debug, Default)]
pub struct Bag {
    /// Counts of the work done.
    pub counts: Counts,
    /// Findings, one for each likely cause.
    pub reports: BTreeMap<String, Report>,
}

/// The seed of a case of a hunt.
pub fn seed_of(hunt: u64, number: u64) -> u64 {
    mixed(mixed(hunt) ^ number)
}

/// A case and the ways in which it is run, by its seed.
pub fn drawn(seed: u64, max_size: usize) -> (Case, Vec<Setup>) {
    let case = draw::case(seed, max_size);
    let setups = draw::setups(&case, &mut Rng::new(mixed(seed)));
    (case, setups)
}

/// Shrinks the case of a finding and reports it.
pub fn reduced(
    seed: u64,
    case: Case,
    finding: Finding,
    deadline: Instant,
    plant: Plant<'_>,
) -> Report {
    let setup = finding.setup.clone();
    let like = |trial: &Trial| {
        let setups = if trial.setup == Setup::default() {
            Vec::new()
        } else {
            vec![trial.setup.clone()]
        };
        judge_planted(&trial.case, &setups, &mut Counts::default(), plant)
            .filter(|found| found.is_like(&finding))
    };
    let trial = shrink(Trial { case, setup }, deadline, |trial| {
        like(trial).is_some()
    });
    let finding = like(&trial).unwrap_or(finding);
    let program = printed(&format!("random_program_{seed}"), &trial, &finding);
    Report {
        seed,
        times: 1,
        finding,
        trial,
        program,
    }
}

/// A finding as a test.
pub fn printed(name: &str, trial: &Trial, finding: &Finding) -> String {
    let mut witness = Witness::default();
    let ran = execute(&trial.case, &Setup::default(), Some(&mut witness));
    let wanted = match finding.fault {
        Fault::Reference(_) if ran.is_ok() => {
            reference(&trial.case, &witness, Precision::Double).ok()
        }
        _ => None,
    };
    let claim = match (&finding.fault, &wanted) {
        (Fault::Reference(_), Some(outcome)) => Claim::Gives(outcome),
        (Fault::Differs(_), _) if trial.setup.rounds() => Claim::Close,
        (Fault::Differs(_), _) => Claim::SameBits,
        _ => Claim::Runs,
    };
    test(name, &finding.text(), &trial.case, &trial.setup, &claim)
}

struct Shared {
    next: AtomicU64,
    stop: AtomicBool,
    bag: Mutex<Bag>,
    /// The case that each worker runs.
    under_way: Vec<Mutex<Option<UnderWay>>>,
}

/// A running case.
#[derive(Clone)]
struct UnderWay {
    seed: u64,
    since: Instant,
    /// The file with the processor time of the thread, and its value at the start.
    clock: Option<(PathBuf, f64)>,
}

/// Seconds of processor time of a thread, as Linux reports them.
fn processor_seconds(stat: &std::path::Path) -> Option<f64> {
    let text = std::fs::read_to_string(stat).ok()?;
    // Behind the name, which may have blanks in it: the 12th and 13th fields, in hundredths of a
    // second.
    let mut fields = text.rsplit(')').next()?.split_whitespace().skip(11);
    let [user, system] = [fields.next()?, fields.next()?].map(|f| f.parse::<f64>().unwrap_or(0.0));
    Some((user + system) / 100.0)
}

impl UnderWay {
    fn begin(seed: u64) -> UnderWay {
        let stat = std::fs::read_link("/proc/thread-self")
            .ok()
            .map(|thread| PathBuf::from("/proc").join(thread).join("stat"));
        let clock = stat.and_then(|stat| Some((stat.clone(), processor_seconds(&stat)?)));
        UnderWay {
            seed,
            since: Instant::now(),
            clock,
        }
    }

    /// The seconds so far, if they exceed the limit.
    fn too_long(&self) -> Option<f64> {
        let waited = self.since.elapsed().as_secs_f64();
        if waited <= CASE_MAX {
            return None;
        }
        let used = self
            .clock
            .as_ref()
            .and_then(|(stat, before)| Some(processor_seconds(stat)? - before))
            .unwrap_or(waited);
        (used > CASE_MAX || waited > WAIT_MAX).then_some(waited)
    }
}

fn locked<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex
        .lock()
        .unwrap_or_else(std::sync::PoisonError::into_inner)
}

impl Hunt {
    /// Hunts until the time or the number of cases is reached.
    pub fn go(&self) -> Bag {
        self.go_planted(&|_, _, _| {})
    }

    /// [`Hunt::go`] with results that are changed before they are compared.
    pub fn go_planted(&self, plant: Plant<'_>) -> Bag {
        let started = Instant::now();
        let shared = Shared {
            next: AtomicU64::new(0),
            stop: AtomicBool::new(false),
            bag: Mutex::default(),
            under_way: (0..self.threads.max(1)).map(|_| Mutex::default()).collect(),
        };
        std::thread::scope(|scope| {
            let mut workers = Vec::new();
            for worker in 0..shared.under_way.len() {
                let shared = &shared;
                let built = std::thread::Builder::new()
                    .stack_size(STACK)
                    .spawn_scoped(scope, move || self.work(shared, worker, plant));
                workers.push(built.unwrap_or_else(|e| panic!("a thread cannot be started: {e}")));
            }
            let mut said = Instant::now();
            while workers.iter().any(|w| !w.is_finished()) {
                std::thread::sleep(Duration::from_millis(if self.loud { 100 } else { 5 }));
                if self
                    .seconds
                    .is_some_and(|s| started.elapsed().as_secs_f64() >= s)
                {
                    shared.stop.store(true, Ordering::Relaxed);
                }
                if self.loud && said.elapsed() >= Duration::from_secs(10) {
                    said = Instant::now();
                    println!("{}", locked(&shared.bag).progress(started));
                }
                self.watch(&shared);
            }
        });
        let bag = shared
            .bag
            .into_inner()
            .unwrap_or_else(std::sync::PoisonError::into_inner);
        if self.loud {
            println!("{}", bag.total(self, started));
        }
        bag
    }

    /// Ends the process if a case takes too long: nothing else can end the case.
    fn watch(&self, shared: &Shared) {
        let late = |slot: &Mutex<Option<UnderWay>>| {
            locked(slot)
                .as_ref()
                .and_then(|case| Some((case.seed, case.too_long()?)))
        };
        if let Some((seed, seconds)) = shared.under_way.iter().find_map(late) {
            println!(
                "case {seed} takes {seconds:.0} s so far; to see it again: replay {seed} --max-size {}",
                self.max_size
            );
            std::process::exit(1);
        }
    }

    fn work(&self, shared: &Shared, worker: usize, plant: Plant<'_>) {
        let begin = |seed: u64| {
            *locked(&shared.under_way[worker]) = Some(UnderWay::begin(seed));
            if let Some(trail) = &self.trail {
                let all: Vec<String> = shared
                    .under_way
                    .iter()
                    .filter_map(|s| locked(s).as_ref().map(|case| case.seed.to_string()))
                    .collect();
                // A trail that cannot be written does not stop the hunt.
                drop(std::fs::write(trail, all.join("\n")));
            }
        };
        while !shared.stop.load(Ordering::Relaxed) {
            let number = shared.next.fetch_add(1, Ordering::Relaxed);
            if self.graphs.is_some_and(|most| number >= most) {
                break;
            }
            let seed = seed_of(self.seed, number);
            begin(seed);
            let (case, setups) = drawn(seed, self.max_size);
            let mut counts = Counts::default();
            let found = judge_planted(&case, &setups, &mut counts, plant);
            locked(&shared.bag).counts.add(&counts);
            let Some(finding) = found else { continue };
            let known = {
                let mut bag = locked(&shared.bag);
                bag.reports
                    .get_mut(&finding.signature())
                    .map(|report| report.times += 1)
                    .is_some()
            };
            if !known {
                *locked(&shared.under_way[worker]) = None;
                let signature = finding.signature();
                let report = reduced(seed, case, finding, Instant::now() + SHRINK_MAX, plant);
                if self.loud {
                    println!("{}", report.text(self.max_size));
                }
                locked(&shared.bag)
                    .reports
                    .entry(signature)
                    .and_modify(|r| r.times += 1)
                    .or_insert(report);
            }
        }
        *locked(&shared.under_way[worker]) = None;
    }
}

impl Report {
    /// The report as it is printed.
    pub fn text(&self, max_size: usize) -> String {
        let mut text = String::new();
        let _ = writeln!(text, "found: {}", self.finding.text());
        let _ = writeln!(
            text,
            "to see it again: replay {} --max-size {max_size}",
            self.seed
        );
        let _ = writeln!(
            text,
            "as small as it became, as a test:\n\n{}",
            self.program
        );
        text
    }
}

impl Bag {
    fn progress(&self, started: Instant) -> String {
        let (seconds, c) = (started.elapsed().as_secs_f64(), &self.counts);
        format!(
            "{seconds:6.0} s: {} graphs, {} variants, {} comparisons, {} refused, {:.0} graphs/s, {} kinds of finding",
            c.graphs,
            c.variants,
            c.comparisons,
            c.refused,
            c.graphs as f64 / seconds,
            self.reports.len()
        )
    }

    fn total(&self, hunt: &Hunt, started: Instant) -> String {
        let mut text = format!(
            "seed {}, threads {}, size {}:{}",
            hunt.seed,
            hunt.threads,
            hunt.max_size,
            self.progress(started)
        );
        for report in self.reports.values() {
            let _ = write!(
                text,
                "\n  {} × {} (replay {})",
                report.times,
                report.finding.text().lines().next().unwrap_or_default(),
                report.seed
            );
        }
        text
    }
}
