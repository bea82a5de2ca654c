//! Timing of candidates.

use std::cell::OnceCell;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use slabwise_kernels::memory::Region;
use slabwise_kernels::size::Env;
use slabwise_kernels::spec::{Access, Dims, Operand, Spec};

use super::{Choice, Error};
use crate::cublaslt;
use crate::cudnn;
use crate::device::Device;
use crate::driver::{Clock, DriverError, Edges, Graph, Recording};
use crate::libraries::LibraryError;
use crate::lowered::Lowered;
use crate::program::{Launch, Program, workspace_bytes};
use crate::reservation::{ARENA_ALIGN, Limits};

/// Samples of each candidate.
const SAMPLES: usize = 5;
/// A sample consists of as many captured runs, one after the other, as take so many milliseconds
/// by the fastest candidate.
const SAMPLE_MS: f64 = 0.2;
/// Most runs of a sample.
const RUNS_MAX: f64 = 32.0;
/// Single runs of each candidate; the shortest counts.
const SINGLES: usize = 2;
/// Candidates whose single run took so many times as long as that of the fastest are not sampled.
const HOPELESS: f64 = 3.0;
/// The device works so long before anything is timed, because an idle one has lowered its clocks.
const WARM_UP: Duration = Duration::from_millis(20);
/// The byte that fills operands: in every type of float it gives a small number, and not zeros,
/// which multiply faster.
const FILLED: u8 = 0x3D;

/// The candidates for one product.
pub(super) struct Trial {
    spec: Spec,
    bounds: Env,
    /// The key under which the choice is stored.
    pub key: String,
    candidates: Vec<(Choice, Lowered)>,
    /// Whether the candidates are timed; otherwise the only candidate is just run.
    pub timed: bool,
    /// Whether the choice may be stored: no candidate had a failure that may be temporary.
    pub lasting: bool,
    /// The stored choice that cannot be used, if there is one.
    pub unusable: Option<Choice>,
}

impl Trial {
    pub fn new(spec: Spec, bounds: Env, key: String) -> Trial {
        Trial {
            spec,
            bounds,
            key,
            candidates: Vec::new(),
            timed: true,
            lasting: true,
            unusable: None,
        }
    }

    pub fn spec(&self) -> &Spec {
        &self.spec
    }

    pub fn add(&mut self, choice: Choice, lowered: Lowered) {
        self.candidates.push((choice, lowered));
    }

    pub fn choice(&self, at: usize) -> &Choice {
        &self.candidates[at].0
    }

    /// Whether a choice is one of the candidates, and was timed.
    pub fn has(&self, choice: &Choice, times: &[Option<f64>]) -> bool {
        let mut timed = self.candidates.iter().zip(times);
        timed.any(|((candidate, _), time)| candidate == choice && time.is_some())
    }

    /// The description of the result in the log.
    pub fn summary(&self, times: &[Option<f64>], best: usize) -> String {
        let name = |choice: &Choice| match choice {
            Choice::Ranked => "ranked first".to_string(),
            Choice::Own(name) => name.clone(),
            Choice::Library(algorithm) => format!("cuBLASLt {}", algorithm.id()),
            Choice::Cudnn(algorithm) => format!("cuDNN {}", algorithm.number),
        };
        let of = |(at, (choice, _)): (usize, &(Choice, Lowered))| {
            let time = times[at].map_or("not timed".into(), |ms| format!("{:.1} µs", 1e3 * ms));
            format!(
                "{}{}: {time}",
                if at == best { "→ " } else { "" },
                name(choice)
            )
        };
        let list: Vec<String> = self.candidates.iter().enumerate().map(of).collect();
        format!("product of {:?}: {}", self.spec.dims, list.join(", "))
    }
}

/// A device opened only for timing: its stream is used for nothing else.
pub(super) struct Bench {
    /// Dropped before the device, whose context it needs.
    clock: Clock,
    device: Device,
    room: Option<u64>,
    /// Whether the libraries could be opened, once they were needed: a library that could not is
    /// not tried again for each product.
    cublaslt: OnceCell<Result<(), LibraryError>>,
    cudnn: OnceCell<Result<(), LibraryError>>,
}

impl Bench {
    pub fn open(ordinal: u32, limits: Limits, room: Option<u64>) -> Result<Bench, DriverError> {
        let device = Device::open(ordinal, limits)?;
        Ok(Bench {
            clock: Clock::new()?,
            device,
            room,
            cublaslt: OnceCell::new(),
            cudnn: OnceCell::new(),
        })
    }

    /// cuBLASLt for the device.
    pub fn cublaslt(&self) -> Result<&cublaslt::Handle, LibraryError> {
        let open = || self.device.shared.libraries.cublaslt();
        self.cublaslt
            .get_or_init(|| open().map(|_| ()))
            .clone()
            .and_then(|()| open())
    }

    /// cuDNN for the device.
    pub fn cudnn(&self) -> Result<&cudnn::Handle, LibraryError> {
        let open = || self.device.shared.libraries.cudnn();
        self.cudnn
            .get_or_init(|| open().map(|_| ()))
            .clone()
            .and_then(|()| open())
    }

    /// The time of each candidate of each trial, milliseconds; `None` for candidates that cannot be
    /// run, and where there is no memory to run any.
    pub fn times(&mut self, trials: &[&Trial]) -> Result<Vec<Vec<Option<f64>>>, Error> {
        // Two concurrent benches would time each other.
        static QUIET: Mutex<()> = Mutex::new(());
        let _quiet = QUIET.lock().unwrap_or_else(PoisonError::into_inner);
        let lowered: Vec<&Lowered> = trials
            .iter()
            .flat_map(|trial| trial.candidates.iter().map(|(_, lowered)| lowered))
            .collect();
        let program = self.device.load(&lowered)?;
        let fault = self.device.fault_record()?;
        let (mut first, mut times) = (0, Vec::new());
        let mut is_warm = false;
        for trial in trials {
            times.push(match self.scratch(trial) {
                Ok((arguments, workspace)) => {
                    let all = Runs {
                        bench: self,
                        program: &program,
                        trial,
                        first,
                        fault,
                        arguments: &arguments,
                        workspace,
                    };
                    let warmed = if trial.timed && !is_warm {
                        all.warm_up()
                    } else {
                        Ok(())
                    };
                    is_warm |= trial.timed;
                    let timed = warmed.and_then(|()| all.times());
                    self.device.release(workspace.arena);
                    timed?
                }
                Err(DriverError::OutOfMemory { bytes }) => {
                    log::info!(
                        "a product of {:?} is not timed: there are no {bytes} bytes for it",
                        trial.spec.dims
                    );
                    vec![None; trial.candidates.len()]
                }
                Err(e) => return Err(e.into()),
            });
            first += trial.candidates.len();
        }
        Ok(times)
    }

    /// The memory of a trial: its arguments and the largest workspace, all in one arena.
    fn scratch(&mut self, trial: &Trial) -> Result<(Vec<Region>, Region), DriverError> {
        let bytes = |(operand, dims, _): &(Operand, Dims, Access)| {
            operand
                .extent(dims, &trial.bounds)
                .saturating_mul(operand.dtype.bytes() as u64)
        };
        let mut sizes: Vec<u64> = trial.spec.arguments().iter().map(bytes).collect();
        sizes.push(
            trial
                .candidates
                .iter()
                .map(|(_, lowered)| workspace_bytes(lowered))
                .max()
                .unwrap_or(0),
        );
        let mut end = 0u64;
        let mut places = Vec::with_capacity(sizes.len());
        for bytes in sizes {
            places.push((end, bytes));
            end = end
                .saturating_add(bytes)
                .checked_next_multiple_of(ARENA_ALIGN)
                .unwrap_or(u64::MAX);
        }
        if self.room.is_some_and(|room| end > room) {
            return Err(DriverError::OutOfMemory { bytes: end });
        }
        let arena = self.device.reserve(end)?;
        if let Err(e) = self.device.fill(&arena, FILLED) {
            self.device.release(arena.arena);
            return Err(e);
        }
        let mut regions: Vec<Region> = places
            .into_iter()
            .map(|(at, bytes)| arena.part(at, bytes))
            .collect();
        let workspace = regions.pop().unwrap_or(arena);
        Ok((regions, workspace))
    }
}

/// A running trial.
struct Runs<'a> {
    bench: &'a Bench,
    program: &'a Program,
    trial: &'a Trial,
    /// The step of its first candidate.
    first: usize,
    fault: u64,
    arguments: &'a [Region],
    workspace: Region,
}

impl Runs<'_> {
    /// Keeps the device busy with the first candidate, which is one of slabwise.
    fn warm_up(&self) -> Result<(), DriverError> {
        let graph = self.loaded(0)?;
        let began = Instant::now();
        let mut runs = 1;
        while began.elapsed() < WARM_UP {
            (0..runs).try_for_each(|_| self.bench.device.stream.replay(&graph))?;
            self.bench.device.synchronize()?;
            runs *= 2;
        }
        Ok(())
    }

    fn times(&self) -> Result<Vec<Option<f64>>, DriverError> {
        let count = self.trial.candidates.len();
        let mut once = Vec::with_capacity(count);
        for at in 0..count {
            once.push(match self.once(at) {
                // A product that a library refuses after all is no candidate.
                Err(DriverError::Library(e)) => {
                    log::error!("{e}; others compute the product");
                    None
                }
                done => Some(done?),
            });
        }
        if !self.trial.timed {
            return Ok(once);
        }
        let least = once.iter().flatten().copied().fold(f64::INFINITY, f64::min);
        // All candidates are run equally often, so that costs of a sample weigh equally.
        let runs = (SAMPLE_MS / least.max(1e-6)).ceil().clamp(1.0, RUNS_MAX);
        let mut samples: Vec<Option<(Graph, Vec<f64>)>> = Vec::with_capacity(count);
        for (at, once) in once.iter().enumerate() {
            samples.push(match once.filter(|ms| *ms <= HOPELESS * least) {
                None => None,
                Some(_) => Some((
                    self.recorded(at, runs as usize)?,
                    Vec::with_capacity(SAMPLES),
                )),
            });
        }
        // Candidates alternate, so that a temporary slowdown of the device affects all of them.
        for _ in 0..SAMPLES {
            for (graph, times) in samples.iter_mut().flatten() {
                times.push(self.timed(graph)? / runs);
            }
        }
        let median = |mut times: Vec<f64>| {
            times.sort_by(f64::total_cmp);
            times[times.len() / 2]
        };
        Ok(samples
            .into_iter()
            .map(|sample| sample.map(|(_, times)| median(times)))
            .collect())
    }

    /// Milliseconds of a single run of a candidate.
    fn once(&self, at: usize) -> Result<f64, DriverError> {
        let graph = self.loaded(at)?;
        let (clock, stream) = (&self.bench.clock, &self.bench.device.stream);
        if !self.trial.timed {
            return clock.time(stream, || stream.replay(&graph));
        }
        (0..SINGLES).try_fold(f64::INFINITY, |least, _| Ok(self.timed(&graph)?.min(least)))
    }

    /// Milliseconds of a graph. A replay that is not timed precedes it, so that the device is busy
    /// while the timed one is submitted: on an idle stream, the time of its submission would count.
    fn timed(&self, graph: &Graph) -> Result<f64, DriverError> {
        let stream = &self.bench.device.stream;
        stream.replay(graph)?;
        self.bench.clock.time(stream, || stream.replay(graph))
    }

    /// A single run of a candidate, captured after a run that loads its code.
    fn loaded(&self, at: usize) -> Result<Graph, DriverError> {
        self.submit(at, None)?;
        self.bench.device.synchronize()?;
        self.recorded(at, 1)
    }

    /// So many runs of a candidate, one after the other, captured; its launches are side by side where
    /// a recorded step has them so, unless the driver refuses.
    fn recorded(&self, at: usize, runs: usize) -> Result<Graph, DriverError> {
        let stream = &self.bench.device.stream;
        let captured = |edges: Option<Edges>| {
            let recording = Recording {
                stream,
                edges,
                early: false,
            };
            stream.capture(|| (0..runs).try_for_each(|_| self.submit(at, Some(&recording))))
        };
        match Edges::of_driver().filter(|_| self.trial.candidates[at].1.side_by_side) {
            None => captured(None),
            edges => captured(edges).or_else(|_| captured(None)),
        }
    }

    fn submit(&self, at: usize, recording: Option<&Recording<'_>>) -> Result<(), DriverError> {
        let launch = Launch {
            step: self.first + at,
            kernel: &self.trial.candidates[at].1,
            arguments: self.arguments,
            workspace: self.workspace,
        };
        let Bench { device, .. } = self.bench;
        device.submit(
            self.program,
            self.fault,
            &self.trial.bounds,
            &launch,
            recording,
        )
    }
}
