//! A CUDA device as a target of kernels.

use std::sync::{Arc, Mutex, PoisonError};

use slabwise_cuda::{Choice, Lowered, Tuner};
use slabwise_kernels::cpu::SpecError;
use slabwise_kernels::dtype::DType;
use slabwise_kernels::size::{Env, Size};
use slabwise_kernels::spec::{Quantization, Scores, Spec};

use super::CAPABILITIES;
use crate::backend::cache::SpecMap;
use crate::backend::{Capabilities, Sectors};

/// A CUDA device that kernels are prepared for.
#[derive(Clone, Debug)]
pub struct Target {
    pub(in crate::backend) target: slabwise_cuda::Target,
    /// The tuner of products, if they are timed.
    pub(in crate::backend) tuner: Option<Tuner>,
    /// The facts that passes ask for about each candidate of theirs.
    pub(in crate::backend) modelled: Arc<Modelled>,
}

/// Facts about specs, which are found by lowering them. Each is asked for many times, because the
/// layers of a network repeat, and passes compare candidates that share kernels.
#[derive(Debug, Default)]
pub(in crate::backend) struct Modelled {
    cycles: Facts<Option<f64>>,
    has_kernel: Facts<bool>,
}

/// A fact about each spec of a device, within bounds.
type Facts<T> = Mutex<SpecMap<(slabwise_cuda::Target, Env), T>>;

/// A fact about a spec, which is `found` if it is not known.
fn fact<T: Clone>(
    facts: &Facts<T>,
    (spec, bounds, target): (&Spec, &Env, &slabwise_cuda::Target),
    found: fn(&Spec, &Env, &slabwise_cuda::Target) -> T,
) -> T {
    let locked = || facts.lock().unwrap_or_else(PoisonError::into_inner);
    let key = (*target, *bounds);
    let known = locked().get(spec, &key);
    known.unwrap_or_else(|| {
        let fact = found(spec, bounds, target);
        locked().insert(spec, key, fact.clone());
        fact
    })
}

/// A kernel for a CUDA device.
pub struct Kernel {
    /// The spec that it was lowered from.
    pub(super) spec: Spec,
    pub(super) lowered: Lowered,
}

impl Kernel {
    /// Like [`Kernel::sources`](crate::backend::Kernel::sources).
    pub(in crate::backend) fn sources(&self) -> Vec<(&str, &str)> {
        let functions = self.lowered.functions.iter();
        functions
            .map(|f| (f.name.as_str(), f.source.as_str()))
            .collect()
    }
}

impl Target {
    pub(in crate::backend) fn capabilities(&self) -> Capabilities {
        CAPABILITIES
    }

    /// Like [`Kernel::new`](crate::backend::Kernel::new).
    pub(in crate::backend) fn prepare(
        &self,
        spec: Spec,
        bounds: &Env,
        guarded: bool,
        choice: &Choice,
    ) -> Result<Kernel, SpecError> {
        let target = slabwise_cuda::Target {
            guarded,
            ..self.target
        };
        let lowered = slabwise_cuda::lower_as(&spec, bounds, &target, choice)?;
        Ok(Kernel { spec, lowered })
    }

    pub(in crate::backend) fn has_attention(
        &self,
        scores: &Scores,
        operands: &[(DType, Size)],
    ) -> bool {
        slabwise_cuda::has_attention(&self.target, scores, operands)
    }

    pub(in crate::backend) fn has_quantized_matmul(&self, format: Quantization, rows: i64) -> bool {
        slabwise_cuda::has_quantized_matmul(&self.target, format, rows)
    }

    pub(in crate::backend) fn choose(&self, specs: &[(&Spec, bool)], bounds: &Env) -> Vec<Choice> {
        let Some(tuner) = &self.tuner else {
            return vec![Choice::default(); specs.len()];
        };
        let of = |&(spec, guarded): &(_, bool)| {
            let target = slabwise_cuda::Target {
                guarded,
                ..self.target
            };
            (spec, target)
        };
        tuner.choose(&specs.iter().map(of).collect::<Vec<_>>(), bounds)
    }

    pub(in crate::backend) fn has_same_sums(
        &self,
        a: &Spec,
        b: &Spec,
        bounds: &Env,
    ) -> Option<bool> {
        slabwise_cuda::has_same_sums(a, b, bounds, &self.target).ok()
    }

    pub(in crate::backend) fn sectors(&self) -> Option<Sectors> {
        let target = &self.target;
        let moved = f64::from(target.multiprocessors) * f64::from(target.speeds.memory) / 1e3;
        Some(Sectors {
            bytes: u64::from(target.sector_bytes),
            bytes_per_cycle: moved,
        })
    }

    pub(in crate::backend) fn cycles(&self, spec: &Spec, bounds: &Env) -> Option<f64> {
        let of = (spec, bounds, &self.target);
        fact(&self.modelled.cycles, of, slabwise_cuda::cycles)
    }

    pub(in crate::backend) fn has_kernel(&self, spec: &Spec, bounds: &Env) -> bool {
        let of = (spec, bounds, &self.target);
        fact(&self.modelled.has_kernel, of, slabwise_cuda::has_kernel)
    }

    pub(in crate::backend) fn cycles_saved(
        &self,
        before: &Spec,
        after: &Spec,
        bounds: &Env,
    ) -> Option<f64> {
        slabwise_cuda::cycles_saved(before, after, bounds, &self.target)
    }

    pub(in crate::backend) fn set_tf32(&mut self, tf32: bool) {
        self.target.tf32 = tf32;
    }

    pub(in crate::backend) fn time_from(&mut self, worth: Option<i64>) {
        let tuner = self.tuner.take();
        self.tuner = worth.and_then(|worth| tuner.map(|tuner| Tuner { worth, ..tuner }));
    }
}

impl Kernel {
    pub(in crate::backend) fn spec(&self) -> &Spec {
        &self.spec
    }

    pub(in crate::backend) fn workspace(&self) -> u64 {
        slabwise_cuda::workspace_bytes(&self.lowered)
    }

    pub(in crate::backend) fn library(&self) -> Option<String> {
        self.lowered.library()
    }
}

#[cfg(test)]
mod tests {
    use slabwise_cuda::Description;
    use slabwise_kernels::spec::{Body, Dims, Inst, Matmul, Operand, Store};

    use super::*;
    use crate::backend;

    /// A square product of f32.
    fn product(size: i64) -> Spec {
        let dims = Dims::from_elem(Size::fixed(size), 2);
        let operand = Operand::contiguous(DType::F32, &dims).expect("known sizes");
        Spec {
            body: Body::Matmul(Matmul {
                in_order: true,
                k: Size::fixed(size),
                a: operand.clone(),
                b: operand.clone(),
            }),
            dims,
            reduced: 0,
            operands: vec![operand],
            indices: Vec::new(),
            code: vec![Inst::Acc],
            stores: vec![Store {
                value: 0,
                operand: 0,
            }],
        }
    }

    /// A remembered fact is that of the spec, and of the device with its options.
    #[test]
    fn facts_are_those_of_their_spec_and_device() {
        let device = Description::named("h100").expect("a description").target();
        let exact = backend::Target::described(device);
        let rounded = exact.clone().with_tf32(true);
        let (small, large, bounds) = (product(64), product(1024), Env::default());
        for _ in 0..2 {
            for (target, tf32) in [(&exact, false), (&rounded, true)] {
                let device = slabwise_cuda::Target { tf32, ..device };
                for spec in [&small, &large] {
                    let cycles = slabwise_cuda::cycles(spec, &bounds, &device);
                    assert_eq!(target.cycles(spec, &bounds), cycles);
                    assert!(cycles.is_some() && target.has_kernel(spec, &bounds));
                }
            }
        }
        let cycles = |target: &backend::Target| target.cycles(&large, &bounds);
        assert!(cycles(&rounded) < cycles(&exact));
        let mut wrong = product(64);
        wrong.dims.push(Size::fixed(2));
        assert!(!exact.has_kernel(&wrong, &bounds));
    }
}
