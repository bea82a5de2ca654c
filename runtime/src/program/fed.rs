//! Checks that the values of a run fit a program's inputs, and reads the lengths off them.

use slabwise_kernels::dtype::DType;
use slabwise_kernels::size::{Env, MAX_SYMBOLS, Size, Symbol};

use super::{Compiled, InputSlot};
use crate::buffer::Donated;
use crate::error::{Error, Result};
use crate::feed::{Feed, Lengths, Source};
use crate::shape::Extent;
use crate::words;

/// Lengths of dimensions that inputs of a run have determined so far.
type Known = [Option<u32>; MAX_SYMBOLS];

/// The type and shape of a value that is given for an input.
struct FedShape {
    dtype: DType,
    /// `None` for a flat slice, which takes the shape of the input.
    lengths: Option<Lengths>,
    elements: usize,
}

impl FedShape {
    fn of(source: &Source<'_>) -> FedShape {
        let buffer = match source {
            Source::Host {
                dtype,
                lengths,
                elements,
                ..
            } => {
                return FedShape {
                    dtype: *dtype,
                    lengths: lengths.clone(),
                    elements: *elements,
                };
            }
            Source::Resident(buffer) => *buffer,
            Source::Donated(Donated(buffer)) => buffer,
        };
        FedShape {
            dtype: buffer.dtype,
            lengths: Some(buffer.lengths.clone()),
            elements: buffer.lengths.iter().product(),
        }
    }
}

impl Compiled {
    /// The sizes of this run, read off its inputs; an error names the input, its shape and the
    /// expected one.
    pub fn sizes(&self, feed: &dyn Feed) -> Result<Env> {
        if feed.count() != self.inputs.len() {
            let (given, takes) = (feed.count(), words::count(self.inputs.len(), "input"));
            let names = if self.inputs.is_empty() {
                String::new()
            } else {
                format!(", {}", words::list(self.inputs.iter().map(|i| &*i.name)))
            };
            let were = if given == 1 { "was" } else { "were" };
            return Err(Error::Value(format!(
                "\"{}\" takes {takes}{names}; {given} {were} given",
                self.name
            )));
        }
        let mut known: Known = Default::default();
        let (mut result, mut shown) = (Ok(()), 0);
        feed.each(&mut |at, source| {
            shown += 1;
            if result.is_ok() && at + 1 != shown {
                result = Err(Error::Value(format!(
                    "a Feed shows input {at} where input {} is due",
                    shown - 1
                )));
            }
            if result.is_ok() {
                result = self.fit(at, &FedShape::of(&source), &mut known);
            }
            if let (Ok(()), Source::Host { dtype, misfit, .. }) = (&result, &source)
                && let Some(misfit) = misfit()
            {
                let lengths = FedShape::of(&source).lengths;
                result = Err(Error::Input {
                    name: self.inputs[at].name.to_string(),
                    message: misfit.message(*dtype, lengths.as_deref()),
                });
            }
        });
        result.map_err(|error| self.swapped(feed, error))?;
        if shown != self.inputs.len() {
            return Err(Error::Value(format!(
                "a Feed that says it has {} shows {shown}",
                words::count(feed.count(), "input")
            )));
        }
        let mut env = Env::default();
        for (symbol, _, extent) in self.symbols.iter() {
            let i = usize::from(symbol.0);
            env.0[i] = match extent {
                // A dimension that no input has runs at its bound.
                Extent::Bounded(max) | Extent::Unbounded(max) => known[i].unwrap_or(max),
                // Until a kernel has computed it.
                Extent::DataDependent(_) => 0,
                Extent::Rank(group) => group.place_of(self.rank[0]) as u32,
                Extent::Share(share) => share.at(&env),
                Extent::Computed(formula) => formula.at(&env),
            };
        }
        self.check_derived(feed, &env)?;
        let checked = self.check_needed(None, &env);
        checked.map_err(|error| self.without_rows(&env).unwrap_or(error))?;
        Ok(env)
    }

    /// Checks the lengths of inputs that follow from several others, or from the rank.
    fn check_derived(&self, feed: &dyn Feed, env: &Env) -> Result<()> {
        let derived = |dim: Size| {
            let extents = || dim.symbols().map(|symbol| self.symbols.extent(symbol));
            let is_late = |extent| matches!(extent, Extent::DataDependent(_));
            dim.as_fixed().is_none() && self.solvable(dim).is_none() && !extents().any(is_late)
        };
        let slots = &self.inputs;
        if !slots
            .iter()
            .any(|slot| slot.dims.iter().any(|&dim| derived(dim)))
        {
            return Ok(());
        }
        let mut result = Ok(());
        feed.each(&mut |at, source| {
            let (slot, given) = (&slots[at], FedShape::of(&source));
            let other = slot.dims.iter().enumerate().find(|&(axis, &dim)| {
                let length = dim.usize_at(env);
                let fed = given.lengths.as_ref().map(|lengths| lengths[axis]);
                derived(dim) && fed.is_some_and(|fed| fed != length)
            });
            let elements = slot.dims.iter().map(|dim| dim.usize_at(env)).product::<usize>();
            if result.is_ok() && (other.is_some() || elements != given.elements) {
                let lengths: Lengths = slot.dims.iter().map(|dim| dim.usize_at(env)).collect();
                result = Err(Error::Input {
                    name: slot.name.to_string(),
                    message: format!(
                        "{} elements were given, {} is expected, which is {lengths:?} beside the other inputs",
                        given.elements,
                        self.symbols.show(&slot.dims)
                    ),
                });
            }
        });
        result
    }

    /// The symbol of an input's length, if that follows from it alone and inputs determine it.
    fn solvable(&self, dim: Size) -> Option<Symbol> {
        let mut symbols = dim.symbols();
        let symbol = symbols.next().filter(|_| symbols.next().is_none())?;
        let extent = self.symbols.extent(symbol);
        matches!(extent, Extent::Bounded(_) | Extent::Unbounded(_)).then_some(symbol)
    }

    /// The error of a rank whose part of the batch is empty, or of a batch with an empty
    /// [share](crate::Tensor::shares).
    fn without_rows(&self, env: &Env) -> Option<Error> {
        let [rank, ranks, sharing] = self.rank;
        let first = self.inputs.first()?;
        let fewer = self.symbols.iter().find_map(|(_, _, extent)| match extent {
            Extent::Share(share) if share.at(env) == 0 && ranks == 1 => {
                let rows = env.0[usize::from(share.rows.0)];
                Some((self.symbols.name(share.rows), rows, share.parts))
            }
            _ => None,
        });
        if let Some((name, rows, parts)) = fewer {
            return Some(Error::Input {
                name: first.name.to_string(),
                message: format!(
                    "\"{name}\" is {rows}, and each of the {parts} parts that shares({parts}) makes needs a row; \
                     leave out batches of fewer than {parts} rows, or join the last one with the batch before it"
                ),
            });
        }
        let is_empty = ranks > 1 && first.dims.first()?.at(env) == 0;
        is_empty.then(|| Error::Input {
            name: first.name.to_string(),
            message: format!(
                "rank {rank} of {ranks} has no row of this batch (\"{}\" is 0 long), and the step needs one of each rank; \
                 leave out batches of fewer than {sharing} rows, or join the last one with the batch before it",
                first.name
            ),
        })
    }

    /// The number of examples of a run: the length of its first input, 1 without one.
    pub fn examples(&self, feed: &dyn Feed) -> Result<usize> {
        let env = self.sizes(feed)?;
        Ok(self
            .inputs
            .first()
            .and_then(|input| input.dims.first())
            .map_or(1, |length| length.usize_at(&env)))
    }

    /// An error of a feed whose inputs would fit in one other order, which is said then.
    fn swapped(&self, feed: &dyn Feed, error: Error) -> Error {
        let Error::Input { name, mut message } = error else {
            return error;
        };
        let mut given: Vec<FedShape> = Vec::new();
        feed.each(&mut |_, source| given.push(FedShape::of(&source)));
        let mut orders = Vec::new();
        if given.len() == self.inputs.len() && given.len() <= 8 {
            self.orders(&given, &Known::default(), &mut Vec::new(), &mut orders);
        }
        if let [order] = &orders[..]
            && !order.iter().copied().eq(0..order.len())
        {
            // `order[at]` is the value that fits the input `at`: the values were given in the
            // inverse order.
            let place = |given: usize| order.iter().position(|&o| o == given).unwrap_or(given);
            let were = (0..order.len()).map(|given| &*self.inputs[place(given)].name);
            let takes = self.inputs.iter().map(|i| &*i.name);
            let (were, takes) = (
                were.collect::<Vec<_>>().join(", "),
                takes.collect::<Vec<_>>().join(", "),
            );
            message = format!(
                "{message}; the inputs seem to be in the order {were}, \"{}\" takes them as {takes}",
                self.name
            );
        }
        Error::Input { name, message }
    }

    /// Orders of the given values in which each fits its input, two at most.
    fn orders(
        &self,
        given: &[FedShape],
        known: &Known,
        order: &mut Vec<usize>,
        found: &mut Vec<Vec<usize>>,
    ) {
        let at = order.len();
        if at == given.len() {
            return found.push(order.clone());
        }
        for next in (0..given.len())
            .filter(|next| !order.contains(next))
            .collect::<Vec<_>>()
        {
            let mut known = *known;
            if found.len() < 2 && self.fit(at, &given[next], &mut known).is_ok() {
                order.push(next);
                self.orders(given, &known, order, found);
                order.pop();
            }
        }
    }

    /// Checks that a value fits an input, where other inputs determine some lengths already.
    fn fit(&self, at: usize, given: &FedShape, known: &mut Known) -> Result<()> {
        let Some(slot) = self.inputs.get(at) else {
            return Err(Error::Value(format!(
                "a Feed shows input {at}; \"{}\" takes {}",
                self.name,
                words::count(self.inputs.len(), "input")
            )));
        };
        let fail = |message: String| {
            Err(Error::Input {
                name: slot.name.to_string(),
                message,
            })
        };
        let dtype = given.dtype;
        if dtype != slot.dtype && !(slot.dtype == DType::Bool && dtype == DType::U8) {
            return fail(format!("{dtype} was given, {} is expected", slot.dtype));
        }
        let lengths = given
            .lengths
            .clone()
            .map_or_else(|| self.flat(slot, given.elements, known), Ok)?;
        let expected = self.symbols.show(&slot.dims);
        if lengths.len() != slot.dims.len() {
            return fail(format!(
                "shape {lengths:?} was given, {expected} is expected"
            ));
        }
        for (&length, &dim) in lengths.iter().zip(&slot.dims) {
            if let Some(n) = dim.as_fixed() {
                if i64::try_from(length) != Ok(n) {
                    return fail(format!(
                        "shape {lengths:?} was given, {expected} is expected"
                    ));
                }
                continue;
            }
            // A length that depends on several others is checked when all are known.
            let Some(symbol) = self.solvable(dim) else {
                continue;
            };
            let (name, (scale, offset)) = (self.symbols.name(symbol), dim.parts());
            let scaled = i64::try_from(length)
                .unwrap_or(i64::MAX)
                .saturating_sub(offset);
            if scaled < 0 || scaled % scale != 0 {
                return fail(format!(
                    "shape {lengths:?} was given, {expected} is expected, and no length of \"{name}\" makes an axis {length} long"
                ));
            }
            let length = (scaled / scale) as usize;
            match self.symbols.extent(symbol) {
                Extent::Bounded(bound) if length > bound as usize => {
                    return fail(format!(
                        "shape {lengths:?} was given: \"{name}\" is {length}, more than its bound {bound}; compile with a larger bound or feed smaller parts"
                    ));
                }
                Extent::Unbounded(_) if u32::try_from(length).is_err() => {
                    return fail(format!(
                        "shape {lengths:?} was given: \"{name}\" is {length}; an unbounded dimension is at most {} long",
                        u32::MAX
                    ));
                }
                _ => {}
            }
            let slot = &mut known[usize::from(symbol.0)];
            if slot.is_some_and(|known| known as usize != length) {
                return fail(format!(
                    "shape {lengths:?} was given: \"{name}\" is {length}, but {} in another input",
                    slot.unwrap_or(0)
                ));
            }
            *slot = Some(length as u32);
        }
        Ok(())
    }

    /// The shape of a flat slice: the input's own, with its one unknown length computed.
    fn flat(&self, slot: &InputSlot, elements: usize, known: &Known) -> Result<Lengths> {
        let env = Env(std::array::from_fn(|i| known[i].unwrap_or(0)));
        let fixed = |d: &Size| {
            d.symbols()
                .all(|symbol| known[usize::from(symbol.0)].is_some())
                .then(|| d.usize_at(&env))
        };
        let rest: usize = slot
            .dims
            .iter()
            .filter_map(fixed)
            .fold(1, usize::saturating_mul);
        let unknown = slot.dims.iter().filter(|d| fixed(d).is_none()).count();
        let fits = if unknown == 0 {
            rest == elements
        } else {
            unknown == 1 && rest > 0 && elements.is_multiple_of(rest)
        };
        if !fits {
            let message = format!(
                "{elements} elements were given, {} is expected",
                self.symbols.show(&slot.dims)
            );
            return Err(Error::Input {
                name: slot.name.to_string(),
                message,
            });
        }
        Ok(slot
            .dims
            .iter()
            .map(|d| fixed(d).unwrap_or_else(|| elements / rest))
            .collect())
    }
}
