//! The keys and values of a sequence so far.

use std::panic::Location;

use slabwise_kernels::dtype::DType;

use crate::params::Init;
use crate::tensor::{AttentionOptions, Tensor};
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
#[derive(Clone, Debug)]
pub struct KvCache<'t> {
    trace: &'t Trace,
    keys: State<'t>,
    values: State<'t>,
    length: State<'t>,
}

impl<'t> KvCache<'t> {
    /// Declares the states `name.keys` and `name.values`, f32 `[batch, heads, capacity, width]`, and
    /// `name.length`, an i32 scalar: the positions so far, 0 at first.
    #[track_caller]
    pub fn new(
        trace: &'t Trace,
        name: &str,
        batch: usize,
        heads: usize,
        capacity: usize,
        width: usize,
    ) -> Self {
        let state = |kind: &str| {
            trace.state(
                &format!("{name}.{kind}"),
                DType::F32,
                (batch, heads, capacity, width),
                Init::Constant(0.0),
            )
        };
        KvCache {
            trace,
            keys: state("keys"),
            values: state("values"),
            length: trace.state(
                &format!("{name}.length"),
                DType::I32,
                (),
                Init::Constant(0.0),
            ),
        }
    }

    /// The number of positions so far, an i32 scalar: the position of the first new token.
    pub fn length(&self) -> Tensor<'t> {
        self.length.last()
    }

    /// The positions of so many new tokens, i32 `[count]`, for [`Tensor::rope`].
    #[track_caller]
    pub fn positions(&self, count: usize) -> Tensor<'t> {
        self.trace.arange(count) + self.length()
    }

    /// Forgets all positions: the next token is at position 0. A step of a program that reads a new
    /// prompt calls it first.
    #[track_caller]
    pub fn clear(&self) {
        let none = self.trace.full(0.0, DType::I32, ());
        self.length.advance(|_| none);
    }

    /// Writes keys and values `[batch, heads, new positions, width]` behind those so far, and gives
    /// all `[batch, heads, capacity, width]`; positions not yet written are zeros or old values. A
    /// run that exceeds the capacity fails before it has changed anything.
    #[track_caller]
    pub fn append(&self, keys: Tensor<'t>, values: Tensor<'t>) -> (Tensor<'t>, Tensor<'t>) {
        let at = Location::caller();
        let keys = keys.require_rank("a cache", 4);
        let Some(new) = keys.len(2).filter(|_| !keys.is_poisoned()) else {
            let mistaken = keys.require_fixed_axis("a cache", 2);
            return (mistaken, mistaken);
        };
        let start = self.length();
        self.trace.on_behalf(at, || {
            self.keys
                .advance(|all| all.dynamic_update_slice(2, start, keys));
            self.values
                .advance(|all| all.dynamic_update_slice(2, start, values));
            let new = i32::try_from(new).unwrap_or(i32::MAX);
            self.length.advance(|length| length + new);
        });
        (self.keys.last(), self.values.last())
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
        let past = self.length();
        let (keys, values) = self.append(keys, values);
        queries.attention_with(keys, values, options.causal().past_of_run(past))
    }
}
