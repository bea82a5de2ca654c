//! The cache of a program's plans, one for each range of lengths of its unbounded dimensions.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use slabwise_compiler::shapes::DynamicShapes;
use slabwise_kernels::size::{Env, Symbol};

use super::{Compiled, Program};
use crate::graph::Graph;

/// The counts of a program's plans.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PlanCounts {
    /// Plans made, the one of `compile` among them.
    pub made: u64,
    /// Runs for which there was a plan.
    pub hits: u64,
    /// Plans in the cache.
    pub kept: usize,
    /// Plans dropped to make room for others.
    pub dropped: u64,
    /// Bytes of the largest slab among the plans in the cache.
    pub slab_bytes: u64,
}

/// The graph of a program with unbounded dimensions, and its plans.
pub(crate) struct PerShape {
    pub graph: Graph,
    pub shapes: DynamicShapes,
    pub plans: Mutex<Plans>,
}

/// The plans of a program, and how often they served.
#[derive(Default)]
pub(crate) struct Plans {
    kept: Vec<Kept>,
    clock: u64,
    made: u64,
    hits: u64,
    dropped: u64,
}

/// A plan and its range of lengths.
struct Kept {
    least: Env,
    most: Env,
    used: u64,
    compiled: Arc<Compiled>,
}

impl PerShape {
    fn lock(&self) -> MutexGuard<'_, Plans> {
        // No holder of the lock can leave half a change behind.
        self.plans.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The plan whose range has these lengths.
    pub fn known(&self, lengths: &Env) -> Option<Arc<Compiled>> {
        let mut plans = self.lock();
        plans.clock += 1;
        let now = plans.clock;
        let fits = |k: &&mut Kept| {
            let within = |s: Symbol| (at(&k.least, s)..=at(&k.most, s)).contains(&at(lengths, s));
            self.graph.symbols.unbounded().all(within)
        };
        let found = plans.kept.iter_mut().find(fits)?;
        found.used = now;
        let compiled = found.compiled.clone();
        plans.hits += 1;
        Some(compiled)
    }

    /// Adds a plan to the cache, which drops the one that was used longest ago if it is full.
    pub fn keep(&self, least: Env, most: Env, compiled: Compiled) -> Arc<Compiled> {
        let mut plans = self.lock();
        while plans.kept.len() >= self.shapes.plans_max as usize {
            let oldest = (0..plans.kept.len())
                .min_by_key(|&i| plans.kept[i].used)
                .unwrap_or(0);
            plans.kept.swap_remove(oldest);
            plans.dropped += 1;
        }
        plans.clock += 1;
        plans.made += 1;
        let (used, compiled) = (plans.clock, Arc::new(compiled));
        plans.kept.push(Kept {
            least,
            most,
            used,
            compiled: compiled.clone(),
        });
        compiled
    }

    /// The range around the lengths of a run.
    pub fn around(&self, lengths: &Env) -> (Env, Env) {
        let (mut least, mut most) = (*lengths, *lengths);
        for s in self.graph.symbols.unbounded() {
            let i = usize::from(s.0);
            (least.0[i], most.0[i]) = self.shapes.ranges.around(lengths.0[i]);
        }
        (least, most)
    }
}

impl<const N: usize> Program<N> {
    /// The number of plans made, and of runs for which there was one. Without
    /// [unbounded](crate::Dim::unbounded) dimensions there is one plan, and runs are not counted.
    pub fn plan_counts(&self) -> PlanCounts {
        let Some(shaped) = &self.shaped else {
            return PlanCounts {
                made: 1,
                kept: 1,
                slab_bytes: self.inner.slab_bytes,
                ..PlanCounts::default()
            };
        };
        let plans = shaped.lock();
        let slab_bytes = plans
            .kept
            .iter()
            .map(|k| k.compiled.slab_bytes)
            .max()
            .unwrap_or(0);
        PlanCounts {
            made: plans.made,
            hits: plans.hits,
            kept: plans.kept.len(),
            dropped: plans.dropped,
            slab_bytes,
        }
    }
}

/// The length of a symbol.
pub(crate) fn at(env: &Env, symbol: Symbol) -> u32 {
    env.0[usize::from(symbol.0)]
}
