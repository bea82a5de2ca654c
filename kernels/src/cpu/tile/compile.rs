//! From `code` to steps: levels, liveness, registers.
//!
//! Level n of [`Levels`] is computed in the n-th pass over the reduced axes, its per-row values
//! just before that pass. A per-element value that is live across passes is kept for the whole row.
//! Without reductions, values that are invariant along the last axis are computed once for many
//! rows of tiles, before these.

mod invariant;
mod join;

use smallvec::SmallVec;

pub(super) use invariant::Hoisted;
use invariant::invariant;

use super::chain::{Chain, Found};
use super::ops::OpCode;
use super::reduce::ReduceCode;
use crate::cpu::{Config, SpecError};
use crate::dtype::{DType, Lane};
use crate::spec::analysis::Levels;
use crate::spec::{Inst, Spec, ValueId};

/// The place where a step leaves its value.
#[derive(Clone, Copy, Debug)]
pub(super) struct Place {
    /// Lanes from the start of the register file.
    pub at: usize,
    /// The value is kept for all tiles of the row: this tile's part lies at an offset.
    pub kept: bool,
}

/// One step of the program, run on one tile.
pub(super) enum Step {
    /// Makes an operand's values visible, in place if they are stored as lanes, else copied;
    /// `stored` if they are also stored unchanged.
    Load {
        value: ValueId,
        access: u16,
        place: Place,
        stored: bool,
    },
    /// The same for the anchor's values.
    Acc {
        value: ValueId,
        place: Place,
        stored: bool,
    },
    /// A linear function of the coordinates.
    Index {
        value: ValueId,
        access: u16,
        place: Place,
    },
    /// An operation.
    Apply(Apply),
    /// Several operations.
    Chain(Box<ChainStep>),
    /// Random numbers: an operation that also needs the operand with seed and step, and its stream.
    Random(Apply, u16, u32),
    /// Makes a kept value of an earlier pass visible again.
    Restore { value: ValueId, place: Place },
    /// Adds a tile to an accumulator.
    Reduce(u16),
}

/// An operation on values.
pub(super) struct Apply {
    pub value: ValueId,
    /// Unused arguments repeat the first.
    pub args: [ValueId; 3],
    /// A bit for each argument in use.
    pub used: usize,
    pub code: OpCode,
    pub place: Place,
    /// An operand that the result is stored to directly.
    pub direct: Option<u16>,
    /// The operands, by bit, that this step or a later one still reads: if one of them is
    /// overwritten in place, the result is not stored directly.
    pub unread: u64,
}

/// A chain of operations on values.
pub(super) struct ChainStep {
    pub value: ValueId,
    pub found: Found,
    pub chain: Chain,
    pub place: Place,
    pub direct: Option<u16>,
    /// The operands, by bit, that a later step still reads, or this one as another argument than
    /// the first, and the operand of that.
    pub unread: u64,
    pub first: u64,
}

/// A reduction.
pub(super) struct ReduceStep {
    pub code: ReduceCode,
    /// The value that is reduced, or the arguments of the operation whose results are; the last one
    /// repeats.
    pub args: [ValueId; 3],
    pub value: ValueId,
    /// Lanes from the start of the register file to the accumulators, a register for each word.
    pub accumulator: usize,
}

/// A value to be stored.
#[derive(Clone, Copy)]
pub(super) struct StoreStep {
    pub value: ValueId,
    pub access: u16,
    pub lane: Lane,
    /// The lane's bits are stored unchanged.
    pub same_bits: bool,
}

/// The steps of one pass.
#[derive(Default)]
pub(super) struct Level {
    /// Computed once per group of kept points, before the pass.
    pub per_row: Vec<Step>,
    /// Computed for each tile of the pass.
    pub per_element: Vec<Step>,
    /// The reductions whose accumulators this pass fills.
    pub reductions: Vec<u16>,
}

/// A compiled program.
pub(super) struct Program {
    pub levels: Vec<Level>,
    pub reductions: Vec<ReduceStep>,
    /// Values that never change, and their bits.
    pub constants: Vec<(ValueId, u32)>,
    /// The steps of the only level where columns go along the last axis, if some are invariant
    /// along it.
    pub hoisted: Option<Hoisted>,
    /// The level in whose pass per-element values are stored.
    pub top: usize,
    pub per_element_stores: Vec<StoreStep>,
    pub per_row_stores: Vec<StoreStep>,
    /// Values kept for a whole row; their buffers, of the caller's choice of length, follow the
    /// registers.
    pub kept: usize,
    /// Lanes of the register file before those buffers, and of a register.
    pub lanes: usize,
    pub register: usize,
    /// A register where a value that repeats can be written out, if there are reductions.
    pub spare: usize,
}

/// The properties of each value that register assignment depends on.
struct Analysis {
    lanes: Vec<Lane>,
    levels: Levels,
    /// Whether it is invariant along the last axis.
    invariant: Vec<bool>,
    /// The last level at which a value is used.
    last_level: Vec<usize>,
    /// The highest level of a live per-element value.
    top: usize,
    /// For an operation or a reduction that is computed together with one of its arguments: which
    /// argument.
    pairs: Vec<Option<usize>>,
    /// Values that are computed as a chain.
    chains: Vec<Option<Found>>,
    /// Values that are only ever computed as part of others.
    absorbed: Vec<bool>,
}

impl Analysis {
    fn new(spec: &Spec, lanes: Vec<Lane>) -> Analysis {
        let n = spec.code.len();
        let levels = Levels::new(spec);
        let top = (0..n)
            .filter(|&i| levels.live[i] && !levels.per_row[i])
            .map(|i| levels.level[i])
            .max()
            .unwrap_or(0);
        let mut analysis = Analysis {
            lanes,
            last_level: levels.last_uses(spec, top),
            levels,
            invariant: invariant(spec),
            top,
            pairs: vec![None; n],
            chains: vec![None; n],
            absorbed: vec![false; n],
        };
        analysis.join(spec);
        analysis
    }

    fn level(&self, i: usize) -> usize {
        self.levels.level[i]
    }

    fn is_live(&self, i: usize) -> bool {
        self.levels.live[i]
    }

    fn is_per_row(&self, i: usize) -> bool {
        self.levels.per_row[i]
    }

    /// Whether per-element value `i` is used after the pass that computes it.
    fn is_live_across(&self, i: usize) -> bool {
        self.levels.is_live_across(i, &self.last_level)
    }
}

/// The state of the assignment of places to values.
struct Compiler<'a> {
    spec: &'a Spec,
    config: &'a Config,
    a: Analysis,
    places: Vec<Option<Place>>,
    /// The number of each reduction.
    reduction_of: Vec<u16>,
    /// Lanes of the register file handed out, and of a register.
    used: usize,
    register: usize,
    /// Registers that values share, by their first lane.
    registers: Vec<usize>,
}

/// Compiles the code of a spec, for registers of `register` lanes.
pub(super) fn compile(spec: &Spec, config: &Config, register: usize) -> Result<Program, SpecError> {
    let a = Analysis::new(spec, spec.check_code()?);
    let n = spec.code.len();
    let mut compiler = Compiler {
        spec,
        config,
        a,
        places: vec![None; n],
        reduction_of: vec![0; n],
        used: 0,
        register,
        registers: Vec::new(),
    };
    let kept = compiler.place_kept();
    let (reductions, spare) = compiler.reductions();
    let depth = compiler.a.levels.depth();
    let levels = (0..=depth).map(|l| compiler.level(l)).collect();
    let hoisted = compiler.hoisted();
    let constants = compiler.needed().filter_map(|i| {
        if let Inst::Const(v) = spec.code[i] {
            Some((i as ValueId, v.bits()))
        } else {
            None
        }
    });
    Ok(Program {
        levels,
        reductions,
        constants: constants.collect(),
        hoisted,
        top: compiler.a.top,
        per_element_stores: compiler.stores(false).collect(),
        per_row_stores: compiler.stores(true).collect(),
        kept,
        lanes: compiler.used,
        register,
        spare,
    })
}

impl Compiler<'_> {
    fn needed(&self) -> impl Iterator<Item = usize> {
        (0..self.spec.code.len()).filter(|&i| self.a.is_live(i) && !self.a.absorbed[i])
    }

    fn is_constant(&self, i: usize) -> bool {
        matches!(self.spec.code[i], Inst::Const(_))
    }

    fn is_reduce(&self, i: usize) -> bool {
        self.spec.code[i].is_reduce()
    }

    fn take(&mut self, registers: usize) -> usize {
        let at = self.used;
        self.used += registers * self.register;
        at
    }

    /// Assigns separate lanes to per-row values and to values live across passes. Of the latter,
    /// loads and indices are not kept for a whole row but recomputed in each pass. Returns the
    /// number of kept values; their buffers follow the registers.
    fn place_kept(&mut self) -> usize {
        let mut kept = 0;
        for i in 0..self.spec.code.len() {
            if !self.a.is_live(i) || self.a.absorbed[i] || self.is_constant(i) || self.is_reduce(i)
            {
                continue;
            }
            if self.a.is_per_row(i)
                || (self.a.is_live_across(i)
                    && matches!(self.spec.code[i], Inst::Load(_) | Inst::Index(_)))
            {
                self.places[i] = Some(Place {
                    at: self.take(1),
                    kept: false,
                });
            } else if self.a.is_live_across(i) {
                self.places[i] = Some(Place {
                    at: kept,
                    kept: true,
                });
                kept += 1;
            }
        }
        kept
    }

    /// Every reduction with its accumulators, and the spare register.
    fn reductions(&mut self) -> (Vec<ReduceStep>, usize) {
        let mut reductions = Vec::new();
        for i in 0..self.spec.code.len() {
            let (Inst::Reduce(op, arg), true) = (&self.spec.code[i], self.a.is_live(i)) else {
                continue;
            };
            self.reduction_of[i] = reductions.len() as u16;
            let args = self.a.arguments(self.spec, i);
            let (a, isa) = (usize::from(*arg), self.config.isa);
            let joined = self.a.pairs[i].and_then(|_| self.a.summed(self.spec, a, isa));
            let code = joined.unwrap_or_else(|| ReduceCode::new(*op, self.a.lanes[a], isa));
            reductions.push(ReduceStep {
                code,
                args: std::array::from_fn(|k| *args.get(k).or(args.last()).unwrap_or(arg)),
                value: i as ValueId,
                accumulator: self.take(code.words),
            });
        }
        let spare = if reductions.is_empty() {
            0
        } else {
            self.take(1)
        };
        (reductions, spare)
    }

    /// The steps of one pass.
    fn level(&mut self, l: usize) -> Level {
        let in_pass = |i: &usize| match &self.spec.code[*i] {
            Inst::Const(_) => false,
            Inst::Reduce(_, arg) => self.a.level(usize::from(*arg)) == l,
            _ => !self.a.is_per_row(*i) && self.a.level(*i) <= l && l <= self.a.last_level[*i],
        };
        let pass: Vec<usize> = self.needed().filter(in_pass).collect();
        let mut level = Level {
            per_element: self.pass(l, &pass),
            ..Level::default()
        };
        level.reductions = pass
            .iter()
            .filter(|&&i| self.is_reduce(i))
            .map(|&i| self.reduction_of[i])
            .collect();
        let per_row = |i: &usize| {
            self.a.is_per_row(*i)
                && self.a.level(*i) == l
                && !self.is_constant(*i)
                && !self.is_reduce(*i)
        };
        level.per_row = self
            .needed()
            .filter(per_row)
            .filter_map(|i| Some(self.step(i, self.places[i]?)))
            .collect();
        level
    }

    /// The steps of some values in one pass.
    fn pass(&mut self, l: usize, pass: &[usize]) -> Vec<Step> {
        let mut steps = Vec::with_capacity(pass.len());
        // Operands that are read, and the last steps that use their values.
        let reads: SmallVec<[(u16, usize); 8]> = pass
            .iter()
            .filter_map(|&i| Some((self.spec.code[i].operand()?, self.last_use(i, l, pass))))
            .collect();
        // Values of earlier passes hold no registers, so all are free.
        let mut free = self.registers.clone();
        let mut live: Vec<(usize, usize)> = Vec::new();
        for (position, &i) in pass.iter().enumerate() {
            steps.push(if self.is_reduce(i) {
                Step::Reduce(self.reduction_of[i])
            } else if let Some(place) = self.places[i] {
                let restored = place.kept && self.a.level(i) < l;
                if restored {
                    Step::Restore {
                        value: i as ValueId,
                        place,
                    }
                } else {
                    self.step(i, place)
                }
            } else {
                let at = free.pop().unwrap_or_else(|| {
                    let at = self.take(1);
                    self.registers.push(at);
                    at
                });
                live.push((at, self.last_use(i, l, pass)));
                self.step(i, Place { at, kept: false })
            });
            // Operands are read again in later passes.
            let unread = |from: usize| {
                let later = reads.iter().filter(move |&&(_, last)| last >= from);
                later.fold(0, |bits, (operand, _)| bits | 1 << operand)
            };
            match steps.last_mut() {
                Some(Step::Apply(apply)) if l == self.a.top => apply.unread = unread(position),
                Some(Step::Chain(chain)) => chain.unread |= unread(position + 1),
                _ => {}
            }
            // A result never shares a register with an argument: registers fall free after the
            // step.
            live.retain(|&(at, last)| {
                if last <= position {
                    free.push(at);
                }
                last > position
            });
        }
        steps
    }

    /// The position in `pass` of the last step that uses a value computed in it.
    fn last_use(&self, value: usize, l: usize, pass: &[usize]) -> usize {
        if l == self.a.top
            && self
                .spec
                .stores
                .iter()
                .any(|s| usize::from(s.value) == value)
        {
            return usize::MAX;
        }
        let uses = |&i: &usize| {
            (self.is_reduce(i) || self.a.level(i) == l)
                && self
                    .a
                    .arguments(self.spec, i)
                    .iter()
                    .any(|&x| usize::from(x) == value)
        };
        pass.iter().rposition(uses).unwrap_or(0)
    }

    /// The step that computes a value.
    fn step(&self, i: usize, place: Place) -> Step {
        let value = i as ValueId;
        let isa = self.config.isa;
        let lane = |v: ValueId| self.a.lanes[usize::from(v)];
        let stored = self.spec.stores.iter().any(|s| s.value == value);
        let apply = |code| {
            let args = self.a.arguments(self.spec, i);
            let arg = |k: usize| args.get(k).copied().unwrap_or(args[0]);
            let direct = if self.a.is_per_row(i) || place.kept {
                None
            } else {
                self.stores(false).find(|s| s.value == value && s.same_bits)
            };
            let used = (1 << args.len()) - 1;
            Apply {
                value,
                args: [arg(0), arg(1), arg(2)],
                used,
                code,
                place,
                direct: direct.map(|s| s.access),
                unread: u64::MAX,
            }
        };
        if let Some(found) = self.a.chains[i] {
            return Step::Chain(Box::new(self.chain(value, found, place)));
        }
        match &self.spec.code[i] {
            Inst::Load(k) => Step::Load {
                value,
                access: *k,
                place,
                stored,
            },
            Inst::Acc => Step::Acc {
                value,
                place,
                stored,
            },
            Inst::Index(k) => Step::Index {
                value,
                access: self.spec.operands.len() as u16 + k,
                place,
            },
            Inst::Uniform { state, stream, .. } => {
                Step::Random(apply(OpCode::uniform(isa)), *state, *stream)
            }
            Inst::Op(op, args) => {
                let joined = self.a.joined(self.spec, i);
                Step::Apply(apply(
                    joined
                        .and_then(|joined| OpCode::joined(joined, isa))
                        .unwrap_or_else(|| OpCode::op(*op, lane(args[op.arity() - 1]), isa)),
                ))
            }
            Inst::Cast(a, to) => Step::Apply(apply(OpCode::cast(lane(*a), *to, isa))),
            Inst::Const(_) | Inst::Reduce(..) => {
                unreachable!("constants and reductions are not computed by steps")
            }
        }
    }

    /// The step of a chain, without the operands that later steps read.
    fn chain(&self, value: ValueId, found: Found, place: Place) -> ChainStep {
        let [first, others @ ..] = found.args;
        let read = |v: ValueId| {
            let operand = self.spec.code[usize::from(v)].operand();
            operand.map_or(0u64, |operand| 1 << operand)
        };
        let others = others.iter().filter(|&&v| v != first);
        ChainStep {
            value,
            found,
            chain: Chain::of(&found, self.config.isa),
            place,
            direct: self
                .stores(false)
                .find(|s| s.value == value && s.same_bits)
                .map(|s| s.access),
            unread: others.fold(0, |bits, &v| bits | read(v)),
            first: read(first),
        }
    }

    /// The stores of per-row values, or of per-element ones.
    fn stores(&self, per_row: bool) -> impl Iterator<Item = StoreStep> {
        self.spec
            .stores
            .iter()
            .filter(move |s| self.a.is_per_row(usize::from(s.value)) == per_row)
            .map(|s| {
                let lane = self.a.lanes[usize::from(s.value)];
                let dtype = self.spec.operands[usize::from(s.operand)].dtype;
                StoreStep {
                    value: s.value,
                    access: s.operand,
                    lane,
                    same_bits: holds_lanes(lane, dtype),
                }
            })
    }
}

/// Whether a lane's bits are stored unchanged.
fn holds_lanes(lane: Lane, dtype: DType) -> bool {
    matches!(
        (lane, dtype),
        (Lane::F32, DType::F32) | (Lane::I32 | Lane::Bool, DType::I32)
    )
}
