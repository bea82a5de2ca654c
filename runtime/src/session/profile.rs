//! The times of a program's kernels, with their roofline floors.

use std::fmt;
use std::io::{Write, stderr};
use std::panic::{AssertUnwindSafe, Location, catch_unwind, resume_unwind};

use slabwise_kernels::size::Env;
use slabwise_kernels::spec::{Body, Spec};
use slabwise_planner::{shortened, table};

use super::Session;
use super::measure::keeps_inputs;
use crate::backend::{Kernel, Roofline};
use crate::error::{Error, Result};
use crate::feed::Feed;
use crate::passes::{moved, operations};
use crate::program::{Compiled, Program, Step};

/// Most characters of a kernel's name in the table.
const NAME_MAX: usize = 56;
/// Most programs, or sizes of one, that a session profiles at its end.
const PROFILES_MAX: usize = 64;

/// The kind of work that bounds a kernel's speed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum KernelFamily {
    /// A matrix product, or a loop with products in it.
    Product,
    /// A convolution or one of its gradients.
    Convolution,
    /// All others, which mostly move bytes.
    Other,
}

/// The time and the work of a kernel.
#[derive(Clone, Debug, PartialEq)]
pub struct KernelTime {
    /// The kernel's name in the plan: its layer and its operations.
    pub name: String,
    /// The kind of its work.
    pub family: KernelFamily,
    /// The line of the user's code that it computes.
    pub location: &'static Location<'static>,
    /// Seconds, the least of all runs. On a CUDA device they are of its own clock, between events
    /// before and after the kernel; a kernel that ends before the next is launched shows the time
    /// of a launch.
    pub seconds: f64,
    /// Arithmetic operations: of products a multiplication and an addition each, of other code one
    /// for each instruction of each element.
    pub flops: u64,
    /// Bytes of operands and results, each moved once.
    pub bytes: u64,
    /// The least seconds that the device could take by its [roofline](Session::roofline), where
    /// it is known. Operands that are still in a cache can take less.
    pub least_seconds: Option<f64>,
}

/// The seconds that some kernels take, and their floors.
#[derive(Clone, Debug, PartialEq)]
pub struct Loss {
    /// The kernels, or the time between them.
    pub name: &'static str,
    /// Seconds of a run.
    pub seconds: f64,
    /// The floors of these kernels, in seconds. One that is faster than its floor, because caches
    /// hold its operands, counts with its own time.
    pub floor: f64,
}

impl Loss {
    /// The seconds above the floors.
    pub fn lost(&self) -> f64 {
        self.seconds - self.floor
    }
}

/// The kernels of a program, measured; `Display` is a table.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct Profile {
    /// The program's name.
    pub program: String,
    /// Its kernels, in the order of [`Plan::steps`](crate::Plan::steps).
    pub kernels: Vec<KernelTime>,
    /// The number of runs.
    pub runs: u64,
    /// Seconds of the fastest run, from the beginning of its first kernel to the end of its last.
    pub fastest_seconds: f64,
    /// Seconds of all runs.
    pub total_seconds: f64,
    /// The limits of the device's speed, where they are known.
    pub roofline: Option<Roofline>,
}

impl Profile {
    /// The time of each family, and that between kernels: the part of the fastest run that the
    /// fastest times of its kernels leave, in which kernels are launched and threads wait for each
    /// other.
    pub fn losses(&self) -> Vec<Loss> {
        let families = [
            ("products", KernelFamily::Product),
            ("convolutions", KernelFamily::Convolution),
            ("memory-bound kernels", KernelFamily::Other),
        ];
        let of = |(name, family)| {
            let kernels = self.kernels.iter().filter(|kernel| kernel.family == family);
            let sum = |sum: Loss, kernel: &KernelTime| Loss {
                seconds: sum.seconds + kernel.seconds,
                floor: sum.floor + kernel.least_seconds.unwrap_or(0.0).min(kernel.seconds),
                ..sum
            };
            let none = Loss {
                name,
                seconds: 0.0,
                floor: 0.0,
            };
            kernels.fold(none, sum)
        };
        let all: f64 = self.kernels.iter().map(|kernel| kernel.seconds).sum();
        let between = Loss {
            name: "between kernels",
            seconds: (self.fastest_seconds - all).max(0.0),
            floor: 0.0,
        };
        families.into_iter().map(of).chain([between]).collect()
    }

    /// A program's kernels, before any run.
    fn new(inner: &Compiled, sizes: &Env, roofline: Option<Roofline>) -> Profile {
        Profile {
            program: inner.name.to_string(),
            kernels: inner
                .steps
                .iter()
                .map(|step| kernel(step, sizes, roofline.as_ref()))
                .collect(),
            runs: 0,
            fastest_seconds: f64::INFINITY,
            total_seconds: 0.0,
            roofline,
        }
    }

    /// Adds a run of the profiled program. Only a run knows all lengths, so that the first one
    /// determines the work of the kernels.
    pub(super) fn add_run(&mut self, inner: &Compiled, sizes: &Env, steps: &[[f64; 2]]) {
        if self.runs == 0 {
            *self = Profile::new(inner, sizes, self.roofline.take());
        }
        self.add(steps);
    }

    /// Adds a run, from the beginning and end of each kernel.
    fn add(&mut self, steps: &[[f64; 2]]) {
        for (kernel, [began, ended]) in self.kernels.iter_mut().zip(steps) {
            kernel.seconds = kernel.seconds.min(ended - began);
        }
        let all = match steps {
            [[first, _], .., [_, last]] | [[first, last]] => last - first,
            [] => 0.0,
        };
        self.runs += 1;
        self.total_seconds += all;
        self.fastest_seconds = self.fastest_seconds.min(all);
    }
}

impl fmt::Display for Profile {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let head = [
            "kernel",
            "µs",
            "MFLOP",
            "MB",
            "GFLOP/s",
            "GB/s",
            "floor µs",
            "of floor",
        ];
        let mut rows = vec![head.map(String::from).to_vec()];
        for kernel in &self.kernels {
            let (seconds, flops, bytes) =
                (kernel.seconds, kernel.flops as f64, kernel.bytes as f64);
            let mut row = vec![shortened(&kernel.name, NAME_MAX)];
            row.extend([1e6 * seconds, flops / 1e6, bytes / 1e6].map(|x| format!("{x:.1}")));
            row.extend([flops, bytes].map(|x| format!("{:.1}", x / seconds / 1e9)));
            if let Some(least) = kernel.least_seconds {
                row.push(format!("{:.1}", 1e6 * least));
                row.push(format!("{:.0} %", 100.0 * least / seconds));
            }
            rows.push(row);
        }
        writeln!(f, "{}", table(&rows, 1))?;
        if let Some(roofline) = &self.roofline {
            let losses = self.losses();
            let losses = losses.iter().map(|loss| {
                let [lost, all] = [loss.lost(), loss.seconds].map(|seconds| 1e6 * seconds);
                format!("{} {lost:.1} of {all:.1}", loss.name)
            });
            writeln!(f, "\nfloors: {}", roofline.source)?;
            let losses: Vec<String> = losses.collect();
            writeln!(f, "lost above the floors, µs: {}", losses.join(" · "))?;
        }
        Ok(())
    }
}

/// The work of a step's kernel.
fn kernel(step: &Step, sizes: &Env, roofline: Option<&Roofline>) -> KernelTime {
    let spec = step.kernel().map(Kernel::spec);
    let sizes = &step.sizes(sizes);
    let [product, code] = spec.map_or([0; 2], |spec| operations(spec, sizes));
    let bytes = spec.map_or(0, |spec| moved(spec, sizes));
    let family = match spec.map(|spec| &spec.body) {
        Some(Body::Conv2d(_)) => KernelFamily::Convolution,
        _ if product > 0 => KernelFamily::Product,
        _ => KernelFamily::Other,
    };
    let half = spec.is_some_and(multiplies_halves);
    KernelTime {
        name: step.name.clone(),
        family,
        location: step.origin.location,
        seconds: f64::INFINITY,
        flops: product.saturating_add(code),
        bytes,
        least_seconds: roofline
            .map(|roofline| roofline.least_seconds([product, code], half, bytes)),
    }
}

/// Whether a spec is a product of halves.
fn multiplies_halves(spec: &Spec) -> bool {
    match &spec.body {
        Body::Matmul(m) => m.a.dtype.is_half(),
        Body::Conv2d(c) => c.a.dtype.is_half(),
        _ => false,
    }
}

/// The profiles of all programs that a session runs with `SLABWISE_PROFILE=1`, by their sizes;
/// printed to stderr when the session is dropped, the one that took most time first.
#[derive(Default)]
pub(super) struct Profiles(Vec<(Env, Profile)>);

impl Profiles {
    /// Adds a run of a program. Programs are distinguished by their names and kernels.
    pub fn add(
        &mut self,
        inner: &Compiled,
        sizes: &Env,
        roofline: impl FnOnce() -> Option<Roofline>,
        steps: &[[f64; 2]],
    ) {
        let known = self.0.iter_mut().position(|(env, profile)| {
            let names = profile.kernels.iter().map(|kernel| &kernel.name);
            env.0 == sizes.0
                && *profile.program == *inner.name
                && names.eq(inner.steps.iter().map(|step| &step.name))
        });
        let at = known.unwrap_or_else(|| {
            if self.0.len() < PROFILES_MAX {
                self.0
                    .push((*sizes, Profile::new(inner, sizes, roofline())));
            }
            self.0.len() - 1
        });
        if known.is_some() || self.0[at].1.runs == 0 {
            self.0[at].1.add(steps);
        }
    }
}

impl Drop for Profiles {
    fn drop(&mut self) {
        self.0
            .sort_by(|(_, a), (_, b)| b.total_seconds.total_cmp(&a.total_seconds));
        for (_, profile) in &self.0 {
            let (name, runs) = (&profile.program, profile.runs);
            let [all, fastest] =
                [profile.total_seconds, profile.fastest_seconds].map(|seconds| 1e3 * seconds);
            // Nobody is left to hear of a closed stderr.
            let _ = writeln!(
                stderr(),
                "\"{name}\", runs: {runs}, {all:.1} ms in all, the fastest {fastest:.3} ms; each kernel's fastest time:\n{profile}"
            );
        }
    }
}

impl Session {
    /// Runs a program `steps` times and returns the fastest time of each of its kernels. With
    /// `SLABWISE_PROFILE=1` a session prints this profile for all its programs when it is dropped.
    ///
    /// # Errors
    /// See [`Session::run`].
    pub fn profile<const N: usize>(
        &mut self,
        program: &Program<N>,
        feed: impl Feed,
        steps: u32,
    ) -> Result<Profile> {
        keeps_inputs(program, &feed)?;
        let inner = self.planned_for(program, &feed)?;
        let (roofline, sizes) = (self.roofline(), inner.sizes(&feed)?);
        self.execution.profile = Some(Profile::new(&inner, &sizes, roofline));
        let runs = || (0..steps.max(1)).try_for_each(|_| self.run(program, &feed).map(|_| ()));
        let result = catch_unwind(AssertUnwindSafe(runs));
        let profile = self.execution.profile.take();
        result.unwrap_or_else(|panic| resume_unwind(panic))?;
        profile.ok_or_else(|| Error::Internal("a profile without runs".into()))
    }
}
