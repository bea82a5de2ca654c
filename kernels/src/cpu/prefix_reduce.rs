//! Prefix reductions (running sums and others) along the last axis.
//!
//! Rows are shared among threads, and one thread walks along a row, so the number of threads
//! changes no bit. Sums of floats are kept in double precision.

use super::pointwise::{OperandView, Space, check_rank};
use super::{Config, Launch, SpecError};
use crate::dtype::{DType, Lane};
use crate::size::Env;
use crate::spec::{Body, PrefixOp, Spec};

/// See [`Body::PrefixReduce`].
pub(crate) struct PrefixReduce;

impl PrefixReduce {
    pub fn new(spec: &Spec, _bound: &Env, _config: &Config) -> Result<Self, SpecError> {
        check_rank(&spec.dims, 1)?;
        Ok(PrefixReduce)
    }

    pub fn workspace(&self) -> u64 {
        0
    }

    /// # Safety
    /// The addresses must be as [`Launch`] promises.
    pub unsafe fn run(&self, spec: &Spec, launch: &Launch) {
        let Body::PrefixReduce(reduction) = &spec.body else {
            unreachable!("checked by new")
        };
        let (env, axis) = (launch.env, spec.dims.len() - 1);
        let (outer, len) = (
            Space::new(&spec.dims[..axis], env),
            spec.dims[axis].usize_at(env),
        );
        if len == 0 {
            return;
        }
        let mut args = launch.args.iter().copied();
        let mut view =
            |operand| OperandView::new(operand, args.next().expect("one address each"), env);
        let source = view(&reduction.source);
        let factor = reduction.factor.as_ref().map(&mut view);
        let result = view(&reduction.result);
        let integer = source.dtype.lane() == Lane::I32;
        launch.team.run(outer.points(), &|row, _| {
            let at = outer.point(row);
            let walk = Walk {
                source: (source, source.offset(&at[..axis])),
                factor: factor.map(|f| (f, f.offset(&at[..axis]))),
                result: (result, result.offset(&at[..axis])),
                axis,
                len,
                reverse: reduction.reverse,
                exclusive: reduction.exclusive,
            };
            // SAFETY: a row inside all operands, of whose result no other worker has any element.
            unsafe {
                match reduction.op {
                    PrefixOp::Sum if integer => walk.run(0i32, |sum, x, _| {
                        *sum = sum.wrapping_add(x as i32);
                        *sum as u32
                    }),
                    PrefixOp::Sum => walk.run(0f64, |sum, x, _| {
                        *sum += f64::from(f32::from_bits(x));
                        (*sum as f32).to_bits()
                    }),
                    PrefixOp::Linear if integer => walk.run(0i32, |state, x, factor| {
                        *state = (factor as i32).wrapping_mul(*state).wrapping_add(x as i32);
                        *state as u32
                    }),
                    PrefixOp::Linear => walk.run(0f64, |state, x, factor| {
                        let [x, factor] = [x, factor].map(|bits| f64::from(f32::from_bits(bits)));
                        *state = factor * *state + x;
                        (*state as f32).to_bits()
                    }),
                    PrefixOp::LogSumExp => walk.run(Exponentials::NONE, |sum, x, _| {
                        *sum = sum.and(f64::from(f32::from_bits(x)));
                        sum.log().to_bits()
                    }),
                    PrefixOp::ArgMax => walk.run_positions(source.dtype, |x, best| x >= best),
                    PrefixOp::ArgMin => walk.run_positions(source.dtype, |x, best| x <= best),
                }
            };
        });
    }
}

/// A sum of exponentials, relative to the largest.
#[derive(Clone, Copy)]
struct Exponentials {
    largest: f64,
    sum: f64,
}

impl Exponentials {
    const NONE: Exponentials = Exponentials {
        largest: f64::NEG_INFINITY,
        sum: 0.0,
    };

    /// With one exponent more.
    fn and(self, x: f64) -> Exponentials {
        if self.largest.is_nan() {
            self
        } else if x == self.largest {
            Exponentials {
                sum: self.sum + 1.0,
                ..self
            }
        } else if x < self.largest {
            Exponentials {
                sum: self.sum + (x - self.largest).exp(),
                ..self
            }
        } else {
            // Larger, or NaN, which stays.
            Exponentials {
                largest: x,
                sum: self.sum * (self.largest - x).exp() + 1.0,
            }
        }
    }

    fn log(self) -> f32 {
        (self.largest + self.sum.ln()) as f32
    }
}

/// A row, and the direction in which it is walked.
struct Walk {
    source: (OperandView, isize),
    factor: Option<(OperandView, isize)>,
    result: (OperandView, isize),
    axis: usize,
    len: usize,
    reverse: bool,
    exclusive: bool,
}

impl Walk {
    /// Stores the result of each step, or of the one before it: `step` takes the state, the bits of
    /// an element and those of its factor.
    ///
    /// # Safety
    /// The operands hold the row, and nothing else accesses that of the result.
    unsafe fn run<S>(&self, mut state: S, mut step: impl FnMut(&mut S, u32, u32) -> u32)
    where
        S: Nothing,
    {
        let mut before = state.bits();
        for k in 0..self.len {
            let at = self.at(k);
            // SAFETY: the caller's promise, of this element of the row.
            unsafe {
                let x = self.load(&self.source, at);
                // The first factor meets no state.
                let factor = self.factor.as_ref().filter(|_| k > 0);
                let factor = factor.map_or(0, |f| self.load(f, at));
                let next = step(&mut state, x, factor);
                self.store(at, if self.exclusive { before } else { next });
                before = next;
            }
        }
    }

    /// Stores the last position whose element is `beyond` the best before it.
    ///
    /// # Safety
    /// See [`Walk::run`].
    unsafe fn run_positions(&self, dtype: DType, beyond: impl Fn(f64, f64) -> bool) {
        let number = |bits: u32| match dtype.lane() {
            Lane::F32 => f64::from(f32::from_bits(bits)),
            Lane::I32 | Lane::Bool => f64::from(bits as i32),
        };
        let mut best: Option<(f64, usize)> = None;
        for k in 0..self.len {
            let at = self.at(k);
            // SAFETY: the caller's promise, of this element of the row.
            unsafe {
                let x = number(self.load(&self.source, at));
                let stays = best.filter(|&(b, _)| !x.is_nan() && (b.is_nan() || !beyond(x, b)));
                let (value, position) = stays.unwrap_or((x, at));
                best = Some((value, position));
                self.store(at, position as u32);
            }
        }
    }

    fn at(&self, step: usize) -> usize {
        if self.reverse {
            self.len - 1 - step
        } else {
            step
        }
    }

    /// # Safety
    /// The element exists.
    unsafe fn load(&self, (view, first): &(OperandView, isize), at: usize) -> u32 {
        // SAFETY: the caller's promise.
        unsafe { view.load(first + at as isize * view.strides[self.axis]) }
    }

    /// # Safety
    /// The element exists, and nothing else accesses it.
    unsafe fn store(&self, at: usize, bits: u32) {
        let (view, first) = &self.result;
        // SAFETY: the caller's promise; results have four bytes.
        unsafe {
            view.element::<u32>(first + at as isize * view.strides[self.axis])
                .write(bits)
        };
    }
}

/// A state before the first element.
trait Nothing {
    /// The bits of its result.
    fn bits(&self) -> u32;
}

impl Nothing for i32 {
    fn bits(&self) -> u32 {
        0
    }
}

impl Nothing for f64 {
    fn bits(&self) -> u32 {
        0
    }
}

impl Nothing for Exponentials {
    fn bits(&self) -> u32 {
        f32::NEG_INFINITY.to_bits()
    }
}
