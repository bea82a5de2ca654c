//! The keys and values of a sequence so far.

use std::panic::Location;

use slabwise_kernels::dtype::DType;

use crate::params::Init;
use crate::tensor::{AttentionOptions, Operand, Tensor};
use crate::trace::{State, Trace};

/// A cache of keys and values for generation token by token: states of the session, which
/// [`append`](KvCache::append) writes in place. A step touches the new positions alone, so that
/// its cost depends on the capacity only in attention itself, which reads all positions.
///
/// Programs of one session that name the same cache share it: one reads a prompt, another
/// continues token by token.
///
/// ```
/// use slabwise::nn::KvCache;
/// use slabwise::tensor::AttentionOptions;
/// # use slabwise::prelude::*;
/// let trace = Trace::inference();
/// let cache = KvCache::new(&trace, "layer0", 1, 2, 1024, 64);
/// # let [q, k, v] = [("q", 8), ("k", 2), ("v", 2)].map(|(n, h)| trace.input(n, F32, (1, h, 1, 64)));
/// // One token: queries [1, 8, 1, 64], keys and values [1, 2, 1, 64].
/// let y = cache.attend(q, k, v, AttentionOptions::new());
/// # let mut session = Session::new(Device::Cpu, Params::seeded(0))?;
/// # session.compile(&trace, [y])?;
/// # Ok::<(), slabwise::Error>(())
/// ```
///
/// The cache of each layer of a model, in half the bytes, for texts of different lengths side by
/// side: [`KvCache::stack`], [`KvCache::of_type`], [`KvCache::by_example`].
#[derive(Clone, Debug)]
pub struct KvCache<'t> {
    trace: &'t Trace,
    /// The name of keys and values, without their ending.
    name: String,
    /// The name of the length.
    counter: String,
    /// Whether the length grows with this cache's positions: of a stack, the last cache's.
    counts: bool,
    /// `[batch, heads, capacity, width]`.
    lengths: [usize; 4],
    dtype: DType,
    by_example: bool,
}

impl<'t> KvCache<'t> {
    /// A cache of the states `name.keys` and `name.values`, f32 `[batch, heads, capacity, width]`,
    /// and `name.length`, an i32 scalar: the positions so far, 0 at first. They are declared where
    /// they are first used.
    #[track_caller]
    pub fn new(
        trace: &'t Trace,
        name: &str,
        batch: usize,
        heads: usize,
        capacity: usize,
        width: usize,
    ) -> Self {
        KvCache {
            trace,
            name: name.into(),
            counter: format!("{name}.length"),
            counts: true,
            lengths: [batch, heads, capacity, width],
            dtype: DType::F32,
            by_example: false,
        }
    }

    /// The caches of several layers, with the states `name.<layer>.keys` and `.values`,
    /// `[batch, heads, capacity, width]`, and one length, `name.length`. A step appends the same
    /// number of positions to each of them, and to the last one last, because the length grows with
    /// it.
    #[track_caller]
    pub fn stack(
        trace: &'t Trace,
        name: &str,
        layers: usize,
        [batch, heads, capacity, width]: [usize; 4],
    ) -> Vec<Self> {
        let layer = |layer: usize| KvCache {
            counter: format!("{name}.length"),
            counts: layer + 1 == layers,
            ..KvCache::new(
                trace,
                &format!("{name}.{layer}"),
                batch,
                heads,
                capacity,
                width,
            )
        };
        (0..layers).map(layer).collect()
    }

    /// With keys and values of another type, f16 or bf16, in half the bytes. Queries and weights of
    /// the attention are rounded to it as well, as operands of the products; sums remain f32.
    pub fn of_type(mut self, dtype: DType) -> Self {
        self.dtype = dtype;
        self
    }

    /// With a length of its own for each example: the state of the length is i32 `[batch]`. Texts
    /// of different lengths then grow side by side. A prompt shorter than others is padded at its
    /// end, and [`KvCache::forget`] forgets the padding.
    pub fn by_example(mut self) -> Self {
        self.by_example = true;
        self
    }

    #[track_caller]
    fn counter(&self) -> State<'t> {
        let name = &self.counter;
        let zero = Init::Constant(0.0);
        match self.by_example {
            true => self.trace.state(name, DType::I32, (self.lengths[0],), zero),
            false => self.trace.state(name, DType::I32, (), zero),
        }
    }

    #[track_caller]
    fn state(&self, kind: &str) -> State<'t> {
        let [batch, heads, capacity, width] = self.lengths;
        let name = format!("{}.{kind}", self.name);
        let shape = (batch, heads, capacity, width);
        self.trace
            .state(&name, self.dtype, shape, Init::Constant(0.0))
    }

    /// The number of positions so far, i32: the position of the first new token. A scalar, or
    /// `[batch]` of a cache [by example](KvCache::by_example).
    #[track_caller]
    pub fn length(&self) -> Tensor<'t> {
        self.counter().last()
    }

    /// The length with `axes` more axes, if it has one.
    #[track_caller]
    fn length_over(&self, axes: usize) -> Tensor<'t> {
        let length = self.length();
        let more = if self.by_example { axes } else { 0 };
        (0..more).fold(length, |x, axis| x.unsqueeze(axis + 1))
    }

    /// The positions of `count` new tokens, for [`Tensor::rope`]: i32 `[count]`, or
    /// `[batch, 1, count]` of a cache [by example](KvCache::by_example).
    #[track_caller]
    pub fn positions(&self, count: usize) -> Tensor<'t> {
        self.trace.arange(count) + self.length_over(2)
    }

    /// Forgets all positions: the next token is at position 0. A step of a program that reads a new
    /// prompt calls it first. Of a [stack](KvCache::stack), one call is for all.
    #[track_caller]
    pub fn clear(&self) {
        let none = match self.by_example {
            true => self.trace.full(0.0, DType::I32, (self.lengths[0],)),
            false => self.trace.full(0.0, DType::I32, ()),
        };
        self.counter().advance(|_| none);
    }

    /// Forgets the last `positions` (i32: a number, a scalar, or `[batch]` of a cache [by
    /// example](KvCache::by_example)), such as the padding of a prompt or rejected guesses; all, if
    /// there are fewer. Later positions are written over them. Of a [stack](KvCache::stack), one
    /// call is for all, after the last append.
    #[track_caller]
    pub fn forget(&self, positions: impl Operand<'t>) {
        let at = Location::caller();
        let positions = positions.lift(self.trace, DType::I32, at);
        self.trace.on_behalf(at, || {
            self.counter()
                .advance(|length| (length - positions).maximum(0));
        });
    }

    /// Writes keys and values `[batch, heads, new positions, width]` after those so far, and gives
    /// all `[batch, heads, capacity, width]`, of the cache's type; positions not yet written are
    /// zeros or old values. A run that exceeds the capacity fails before it has changed anything.
    #[track_caller]
    pub fn append(&self, keys: Tensor<'t>, values: Tensor<'t>) -> (Tensor<'t>, Tensor<'t>) {
        let at = Location::caller();
        if !self.dtype.is_float() {
            let why = format!(
                "a cache of {}: keys and values are f32, f16 or bf16",
                self.dtype
            );
            let mistaken = self.trace.fail(at, "", why);
            return (mistaken, mistaken);
        }
        let keys = keys.require_rank("a cache", 4);
        let Some(new) = keys.len(2).filter(|_| !keys.is_poisoned()) else {
            let mistaken = keys.require_fixed_axis("a cache", 2);
            return (mistaken, mistaken);
        };
        self.trace.on_behalf(at, || {
            let start = self.length();
            let [keys, values] = [("keys", keys), ("values", values)].map(|(kind, new)| {
                let state = self.state(kind);
                let new = new.cast(self.dtype);
                state.advance(|all| all.dynamic_update_slice(2, start, new));
                state.last()
            });
            if self.counts {
                let new = i32::try_from(new).unwrap_or(i32::MAX);
                self.counter().advance(|length| length + new);
            }
            (keys, values)
        })
    }

    /// [Appends](KvCache::append) keys and values `[batch, heads, new positions, width]` and gives
    /// the attention of queries `[batch, query heads, new positions, width]` to all positions up to
    /// their own.
    #[track_caller]
    pub fn attend(
        &self,
        queries: Tensor<'t>,
        keys: Tensor<'t>,
        values: Tensor<'t>,
        options: AttentionOptions<'t>,
    ) -> Tensor<'t> {
        let past = self.length_over(3);
        let (keys, values) = self.append(keys, values);
        queries.attention_with(keys, values, options.causal().past_of_run(past))
    }
}
