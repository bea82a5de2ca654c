//! The tuner: chooses a product's kernel by timing a few candidates.
//!
//! The candidates are the first kernels in the ranking of the model of [`products`], and those
//! that cuBLASLt and cuDNN propose for the same product or convolution, where these libraries are
//! found. Each is run on the device at the sizes of the bounds, in scratch memory that is freed
//! before any other allocation; its time is the median of a few captured runs. An earlier candidate
//! wins unless a later one is clearly faster, so ties and noise favour the model's choice.
//!
//! Specs with one product (the forward pass and its recomputation, a kernel and its recompute
//! clone) get one candidate, timed once, so that they add in one order and recomputation is
//! bit-exact.
//!
//! A choice is kept for the rest of the process and on disk ([`Picks`]), so that it is the same in
//! every run; of processes that time a product at once, all take the choice that is stored first.
//! The lack of a choice is never an error: without memory, time or a library the first
//! kernel of the ranking is used.

mod picks;
mod trial;

use std::sync::Arc;

use slabwise_kernels::size::Env;
use slabwise_kernels::spec::{Body, Spec, SpecError};

pub use picks::Picks;

use crate::abi::Target;
use crate::conv::library::Convolution;
use crate::cublaslt::{self, Algorithm};
use crate::cudnn;
use crate::device::Shared;
use crate::driver::{self, DriverError};
use crate::libraries::{Library, LibraryError};
use crate::lower::lower;
use crate::lower::products::{self, by_cublaslt};
use crate::lowered::Lowered;
use crate::nvrtc;
use crate::reservation::Limits;
use crate::source::PRELUDE;
use trial::{Bench, Trial};

/// Most kernels of slabwise that are timed for one product: each has to be compiled.
const OWN_MAX: usize = 4;

/// Most kernels of each library that are timed.
const LIBRARY_MAX: usize = 3;

/// Products of fewer multiplications are not timed, because every kernel takes as long as its
/// launch.
pub const WORTH: i64 = 1 << 22;

/// A later candidate must take less than this fraction of an earlier one's time.
const CLEARLY: f64 = 0.98;

/// The kernel that computes a spec.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Choice {
    /// The first in the model's ranking.
    #[default]
    Ranked,
    /// The candidate of this name.
    Own(String),
    /// A kernel of cuBLASLt.
    Library(Algorithm),
    /// An algorithm of cuDNN.
    Cudnn(cudnn::Algorithm),
}

/// The source for a spec by a choice, or as [`crate::lower`] if the choice does not fit the spec.
///
/// # Errors
/// See [`crate::lower`].
pub fn lower_as(
    spec: &Spec,
    bounds: &Env,
    target: &Target,
    choice: &Choice,
) -> Result<Lowered, SpecError> {
    match choice {
        Choice::Ranked => lower(spec, bounds, target),
        Choice::Own(name) => Ok(products::named(spec, bounds, target, name)?.lowered),
        Choice::Library(algorithm) => match by_cublaslt(spec, bounds, target) {
            Some(product) => product.by(*algorithm).lower(spec, bounds, target),
            None => lower(spec, bounds, target),
        },
        Choice::Cudnn(algorithm) => match Convolution::of(spec, bounds, target) {
            Some(convolution) => convolution.by(*algorithm).lower(spec, bounds, target),
            None => lower(spec, bounds, target),
        },
    }
}

/// Times candidates on a device.
#[derive(Clone, Debug)]
pub struct Tuner {
    /// The device.
    pub ordinal: u32,
    /// The limits of its memory.
    pub limits: Limits,
    /// The memory limit of timing, bytes, if there is a budget.
    pub room: Option<u64>,
    /// Products of fewer multiplications are not timed.
    pub worth: i64,
    /// Whether cuDNN is a candidate for convolutions.
    pub cudnn: bool,
    /// Earlier choices.
    pub picks: Arc<Picks>,
}

/// Specs that share a product, each spec once.
struct Group<'a> {
    /// The requested specs that belong to the group.
    members: Vec<usize>,
    /// The distinct specs, each with its target.
    specs: Vec<(&'a Spec, Target)>,
    /// The candidates of slabwise that all specs have, in the ranking of the first.
    own: Vec<String>,
    key: String,
}

impl Tuner {
    /// The best kernel for each of these specs, at sizes up to the bounds. Each spec has its own
    /// target.
    pub fn choose(&self, wanted: &[(&Spec, Target)], bounds: &Env) -> Vec<Choice> {
        let mut choices = vec![Choice::Ranked; wanted.len()];
        let Ok(properties) = driver::properties(self.ordinal) else {
            return choices;
        };
        let device = format!(
            "{}, {} bytes, {}, {}",
            properties.description.name,
            properties.total_bytes,
            versions(),
            env!("CARGO_PKG_VERSION")
        );
        let mut open = Vec::new();
        for group in groups(wanted, bounds, self.worth, &device, self.cudnn) {
            match self.picks.in_memory(&group.key) {
                Some(choice) if self.has_library_of(&choice) => group.take(&choice, &mut choices),
                known => {
                    if known.is_some() {
                        self.picks.forget(&group.key);
                    }
                    open.push(group);
                }
            }
        }
        if !open.is_empty()
            && let Err(e) = self.pick(&open, bounds, &mut choices)
        {
            log::warn!("products are computed as ranked, not as timed: {e}");
        }
        choices
    }

    /// Whether the library of a choice can be used: the device may have been closed since it was
    /// made.
    fn has_library_of(&self, choice: &Choice) -> bool {
        let library = match choice {
            Choice::Ranked | Choice::Own(_) => return true,
            Choice::Library(_) => Library::CublasLt,
            Choice::Cudnn(_) => Library::Cudnn,
        };
        Shared::of(self.ordinal).is_ok_and(|shared| shared.libraries.has(library))
    }

    /// All candidates for a product or a convolution, those of the libraries that are found among
    /// them; none if it is not worth timing.
    ///
    /// # Errors
    /// If the device cannot be used, or a library that is found fails.
    pub fn offered(
        &self,
        spec: &Spec,
        target: &Target,
        bounds: &Env,
    ) -> Result<Vec<Choice>, DriverError> {
        let bench = Bench::open(self.ordinal, self.limits, self.room)?;
        let mut all = Vec::new();
        for group in groups(&[(spec, *target)], bounds, self.worth, "", self.cudnn) {
            all.extend(group.own.iter().take(OWN_MAX).cloned().map(Choice::Own));
            let by_cudnn = self.cudnn.then(|| group.offered_by_cudnn(bounds, &bench));
            let by_cublaslt = group.offered_by_cublaslt(bounds, &bench);
            for offered in std::iter::once(by_cublaslt).chain(by_cudnn) {
                match offered {
                    Err(LibraryError::Missing(_)) => {}
                    offered => all.extend(offered?),
                }
            }
        }
        Ok(all)
    }

    /// Takes the choice of another process if it is a kernel of slabwise, which needs no test.
    fn take_own(&self, group: &Group<'_>, kept: Option<&Choice>, choices: &mut [Choice]) -> bool {
        let own =
            kept.filter(|choice| matches!(choice, Choice::Own(name) if group.own.contains(name)));
        if let Some(choice) = own {
            let choice = self.picks.remember(&group.key, choice);
            group.take(&choice, choices);
        }
        own.is_some()
    }

    /// Chooses kernels for groups that are new to the process.
    fn pick(&self, open: &[Group<'_>], bounds: &Env, choices: &mut [Choice]) -> Result<(), Error> {
        let mut bench: Option<Bench> = None;
        let mut trials: Vec<(&Group<'_>, Trial)> = Vec::new();
        let mut logged: Vec<LibraryError> = Vec::new();
        for group in open {
            let mut kept = self.picks.on_disk(&group.key);
            if self.take_own(group, kept.as_ref(), choices) {
                continue;
            }
            let bench = match &mut bench {
                Some(bench) => bench,
                none => none.insert(Bench::open(self.ordinal, self.limits, self.room)?),
            };
            // Choices made while a library cannot be initialized are stored apart from others: it may
            // be so for a moment.
            let unusable = group.unusable(self.cudnn, bounds, bench);
            let key = group.key_without(&unusable);
            if !unusable.is_empty() {
                kept = self.picks.on_disk(&key).or(kept);
                if self.take_own(group, kept.as_ref(), choices) {
                    continue;
                }
            }
            let mut trial = Trial::new(group.specs[0].0.clone(), *bounds, key);
            // A library's kernel that was chosen by another process is still run once, so that it
            // is loaded before a graph is captured.
            let known = match &kept {
                Some(choice) => group.fitting(choice, bounds, bench).unwrap_or_default(),
                None => None,
            };
            trial.timed = known.is_none();
            trial.unusable = kept;
            let others = if trial.timed {
                for name in group.own.iter().take(OWN_MAX) {
                    trial.add(
                        Choice::Own(name.clone()),
                        products::named(trial.spec(), bounds, &group.specs[0].1, name)?.lowered,
                    );
                }
                let by_cudnn = self.cudnn.then(|| group.offered_by_cudnn(bounds, bench));
                let offered =
                    std::iter::once(group.offered_by_cublaslt(bounds, bench)).chain(by_cudnn);
                let mut list = Vec::new();
                for offered in offered {
                    match offered {
                        Ok(choices) => list.extend(choices),
                        Err(e) => {
                            let missing = matches!(e, LibraryError::Missing(_));
                            trial.lasting &= missing || unusable.contains(&e.library());
                            // An error that affects all groups is logged once.
                            if !logged.contains(&e) {
                                let level = if missing {
                                    log::Level::Info
                                } else {
                                    log::Level::Error
                                };
                                log::log!(level, "{e}; products are computed without it");
                                logged.push(e);
                            }
                        }
                    }
                }
                list
            } else {
                known.into_iter().collect()
            };
            for choice in others {
                let lowered = lower_as(trial.spec(), bounds, &group.specs[0].1, &choice)?;
                trial.add(choice, lowered);
            }
            trials.push((group, trial));
        }
        let Some(mut bench) = bench else {
            return Ok(());
        };
        let times = bench.times(&trials.iter().map(|(_, trial)| trial).collect::<Vec<_>>())?;
        for ((group, trial), times) in trials.iter().zip(times) {
            let Some(best) = fastest(&times) else {
                continue;
            };
            let mut choice = trial.choice(best).clone();
            log::info!("{}", trial.summary(&times, best));
            // Another thread or process may have timed the same product meanwhile.
            let is_first = self.picks.in_memory(&group.key).is_none();
            if trial.timed && trial.lasting && is_first {
                let stored = self
                    .picks
                    .store(&trial.key, &choice, trial.unusable.as_ref());
                if trial.has(&stored, &times) {
                    choice = stored;
                }
            }
            let choice = self.picks.remember(&group.key, &choice);
            group.take(&choice, choices);
        }
        Ok(())
    }
}

/// The kernels that a tuner times for these specs and those that it may choose for them, without a
/// device: the candidates of slabwise, and the kernels that follow a library's call.
///
/// # Errors
/// See [`crate::lower`].
pub fn timed(wanted: &[(&Spec, Target)], bounds: &Env) -> Result<Vec<Lowered>, SpecError> {
    // The kernels after a library's call are the same for all its algorithms.
    let by_libraries = [
        Choice::Library(Algorithm {
            words: [0; 8],
            workspace: 0,
        }),
        Choice::Cudnn(cudnn::Algorithm {
            number: 0,
            math: 0,
            workspace: 0,
        }),
    ];
    let mut all = Vec::new();
    for group in groups(wanted, bounds, WORTH, "", false) {
        for (spec, target) in &group.specs {
            for name in group.own.iter().take(OWN_MAX) {
                all.push(products::named(spec, bounds, target, name)?.lowered);
            }
            for choice in &by_libraries {
                all.push(lower_as(spec, bounds, target, choice)?);
            }
        }
    }
    Ok(all)
}

/// Why nothing was timed.
#[derive(Debug, thiserror::Error)]
enum Error {
    #[error(transparent)]
    Driver(#[from] DriverError),
    #[error(transparent)]
    Load(#[from] crate::program::LoadError),
    #[error(transparent)]
    Spec(#[from] SpecError),
}

/// The first time that no later one is clearly below.
fn fastest(times: &[Option<f64>]) -> Option<usize> {
    let mut best: Option<(usize, f64)> = None;
    for (at, time) in times
        .iter()
        .enumerate()
        .filter_map(|(at, time)| Some((at, (*time)?)))
    {
        if best.is_none_or(|(_, least)| time < CLEARLY * least) {
            best = Some((at, time));
        }
    }
    best.map(|(at, _)| at)
}

/// The versions that times depend on.
fn versions() -> String {
    let library = cublaslt::version().map_or_else(|_| "none".into(), |v| v.to_string());
    format!(
        "driver {:?}, NVRTC {:?}, cuBLASLt {library}",
        driver::start().ok(),
        nvrtc::version().ok()
    )
}

/// The version of cuDNN, if it affects the times.
fn version_of_cudnn(used: bool) -> String {
    let found = || cudnn::version().map_or_else(|_| "none".into(), |v| v.to_string());
    if used {
        format!("cuDNN {}", found())
    } else {
        "without cuDNN".into()
    }
}

/// The specs grouped by product, without products below the threshold or without a choice.
fn groups<'a>(
    wanted: &[(&'a Spec, Target)],
    bounds: &Env,
    worth: i64,
    device: &str,
    cudnn: bool,
) -> Vec<Group<'a>> {
    let mut groups: Vec<Group<'a>> = Vec::new();
    for (at, &(spec, target)) in wanted.iter().enumerate() {
        if products::multiplications(spec, bounds) < worth {
            continue;
        }
        let Ok(own) = products::names(spec, bounds, &target) else {
            continue;
        };
        let same = |group: &&mut Group<'_>| {
            group.specs[0].0.body == spec.body && group.specs[0].0.dims == spec.dims
        };
        match groups.iter_mut().find(same) {
            Some(group) => {
                group.members.push(at);
                group.own.retain(|name| own.contains(name));
                if !group.specs.contains(&(spec, target)) {
                    group.specs.push((spec, target));
                }
            }
            None => groups.push(Group {
                members: vec![at],
                specs: vec![(spec, target)],
                own,
                key: String::new(),
            }),
        }
    }
    groups.retain(|group| !group.own.is_empty());
    for group in &mut groups {
        let text = format!("{:?} {:?} {:?}", group.specs, group.own, bounds);
        // Without convolutions cuDNN is not loaded, because that takes a while.
        let more = if matches!(group.specs[0].0.body, Body::Conv2d(_)) {
            version_of_cudnn(cudnn)
        } else {
            String::new()
        };
        group.key = crate::cache::hash(&[device, PRELUDE, &text, &more]);
    }
    groups
}

impl Group<'_> {
    /// Sets the choice of all members.
    fn take(&self, choice: &Choice, choices: &mut [Choice]) {
        self.members
            .iter()
            .for_each(|&at| choices[at] = choice.clone());
    }

    /// The libraries that would propose kernels, and are found, but cannot be initialized.
    fn unusable(&self, cudnn: bool, bounds: &Env, bench: &Bench) -> Vec<Library> {
        let (spec, target) = &self.specs[0];
        let of_cublaslt = by_cublaslt(spec, bounds, target).and_then(|_| bench.cublaslt().err());
        let of_cudnn = Convolution::of(spec, bounds, target)
            .filter(|_| cudnn)
            .and_then(|_| bench.cudnn().err());
        let failed = of_cublaslt.into_iter().chain(of_cudnn);
        failed
            .filter(|e| matches!(e, LibraryError::Failed { .. }))
            .map(|e| e.library())
            .collect()
    }

    /// The key of a choice that is made without these libraries, although they are found.
    fn key_without(&self, libraries: &[Library]) -> String {
        if libraries.is_empty() {
            return self.key.clone();
        }
        crate::cache::hash(&[&self.key, &format!("without {libraries:?}")])
    }

    /// The kernels that cuBLASLt proposes for all members.
    fn offered_by_cublaslt(
        &self,
        bounds: &Env,
        bench: &Bench,
    ) -> Result<Vec<Choice>, LibraryError> {
        let (spec, target) = &self.specs[0];
        let Some(product) = by_cublaslt(spec, bounds, target) else {
            return Ok(Vec::new());
        };
        let mut described = product.described(bounds);
        // The library's check of an algorithm is not told how operands are aligned.
        for (spec, target) in &self.specs[1..] {
            let Some(other) = by_cublaslt(spec, bounds, target) else {
                return Ok(Vec::new());
            };
            described = described.aligned_as(&other.described(bounds));
        }
        let found =
            bench
                .cublaslt()?
                .algorithms(&described, product.workspace_max(bounds), LIBRARY_MAX)?;
        self.all_fitting(found.into_iter().map(Choice::Library), bounds, bench)
    }

    /// The algorithms that cuDNN proposes for all members.
    fn offered_by_cudnn(&self, bounds: &Env, bench: &Bench) -> Result<Vec<Choice>, LibraryError> {
        let (spec, target) = &self.specs[0];
        let Some(convolution) = Convolution::of(spec, bounds, target) else {
            return Ok(Vec::new());
        };
        let Some(described) = convolution.described(bounds) else {
            return Ok(Vec::new());
        };
        let found = bench.cudnn()?.algorithms(
            &described,
            convolution.workspace_max(bounds),
            LIBRARY_MAX,
        )?;
        self.all_fitting(found.into_iter().map(Choice::Cudnn), bounds, bench)
    }

    fn all_fitting(
        &self,
        choices: impl Iterator<Item = Choice>,
        bounds: &Env,
        bench: &Bench,
    ) -> Result<Vec<Choice>, LibraryError> {
        choices
            .filter_map(|choice| self.fitting(&choice, bounds, bench).transpose())
            .collect()
    }

    /// A library's kernel with the largest workspace of all members, if it computes the products of
    /// all of them.
    fn fitting(
        &self,
        choice: &Choice,
        bounds: &Env,
        bench: &Bench,
    ) -> Result<Option<Choice>, LibraryError> {
        let mut specs = self.specs.iter();
        Ok(match *choice {
            Choice::Ranked | Choice::Own(_) => None,
            Choice::Library(algorithm) => {
                let library = bench.cublaslt()?;
                let most = specs.try_fold(algorithm, |most, (spec, target)| {
                    let product = by_cublaslt(spec, bounds, target)?;
                    let workspace = most.workspace.max(
                        library
                            .checked(&product.described(bounds), &algorithm)
                            .ok()?
                            .workspace,
                    );
                    (workspace <= product.workspace_max(bounds))
                        .then_some(Algorithm { workspace, ..most })
                });
                most.map(Choice::Library)
            }
            Choice::Cudnn(algorithm) => {
                let library = bench.cudnn()?;
                let most = specs.try_fold(algorithm, |most, (spec, target)| {
                    let convolution = Convolution::of(spec, bounds, target)?;
                    let workspace = most.workspace.max(
                        library
                            .checked(&convolution.described(bounds)?, &algorithm)
                            .ok()?
                            .workspace,
                    );
                    (workspace <= convolution.workspace_max(bounds))
                        .then_some(cudnn::Algorithm { workspace, ..most })
                });
                most.map(Choice::Cudnn)
            }
        })
    }
}

#[cfg(test)]
mod tests {
    use super::fastest;

    #[test]
    fn a_later_candidate_must_be_clearly_faster() {
        assert_eq!(fastest(&[Some(1.0), Some(0.99), Some(1.0)]), Some(0));
        assert_eq!(fastest(&[Some(1.0), None, Some(0.9), Some(0.89)]), Some(2));
        assert_eq!(fastest(&[None, Some(2.0), Some(1.0)]), Some(2));
        assert_eq!(fastest(&[None, None]), None);
    }
}
