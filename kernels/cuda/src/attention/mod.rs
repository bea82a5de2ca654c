//! Attention whose scores are never in memory, and its gradients, as in Dao, "FlashAttention-2"
//! (2023): tiles of scores are computed in registers, their softmax tile by tile.
//!
//! The backward pass is two launches. The first computes the gradients of queries, and with them
//! the statistics of each query's softmax, which lie in the workspace; the second computes the
//! gradients of keys and values, or two do, where heads are wide. No block adds to the sums of
//! another, so that every run gives the same bits.

mod tiles;

use std::sync::Arc;

use slabwise_kernels::dtype::DType;
use slabwise_kernels::size::{Env, Size};
use slabwise_kernels::spec::{Attention, AttentionGrad, Operand, Scores, Spec, SpecError};

use crate::abi::{Dispatch, Function, Target, Word};
use crate::code::Storage;
use crate::lowered::Lowered;
use crate::source::params::{Number, Params};
use crate::source::space::points;
use tiles::{Pass, Products, Tile};

/// Most queries, keys, preceding keys and keys of a window: their sums are numbers of 32 bits.
const LONGEST: i64 = 1 << 27;

/// Whether a device has kernels for attention of these scores, or for its gradient. Each operand
/// has a type and rows of so many elements; they are queries, keys and values, a mask and a past
/// of the run if there are any, and for the gradient the result and its gradient.
pub fn has_attention(target: &Target, scores: &Scores, operands: &[(DType, Size)]) -> bool {
    let Some((rows, more)) = operands.split_first_chunk::<3>() else {
        return false;
    };
    let widest = Products::of_types(rows.map(|(dtype, _)| dtype), target).widest();
    let narrow = |&(dtype, width): &(DType, Size)| {
        dtype.is_float() && width.as_fixed().is_some_and(|n| n <= widest)
    };
    // The past, which alone is of integers, is the last operand of attention, and none is that of a
    // gradient.
    let is_grad = more.len() >= 2 && more.last().is_some_and(|&(dtype, _)| dtype.is_float());
    let results = &more[if is_grad { more.len() - 2 } else { more.len() }..];
    let known = rows.iter().chain(results).all(narrow);
    is_able(target) && known && more.len() <= 4 && is_near(scores)
}

/// Whether positions of these scores are numbers of 32 bits.
fn is_near(scores: &Scores) -> bool {
    let far = [scores.past.unsigned_abs(), scores.window.unwrap_or(0)];
    scores.step <= 1 && far.iter().all(|&n| i64::from(n) <= LONGEST)
}

/// Whether the kernels run on a device: they copy asynchronously, and share rows among 32 lanes.
fn is_able(target: &Target) -> bool {
    target.sm >= 80 && target.wave_width == 32
}

fn number(f: impl Fn(&Env) -> i64 + Send + Sync + 'static) -> Number {
    Arc::new(f)
}

fn sized(size: Size) -> Number {
    number(move |env| size.at(env))
}

/// The lengths of a spec.
#[derive(Clone)]
struct Shape {
    heads: Vec<Size>,
    queries: Size,
    keys: Size,
    width: Size,
    columns: Size,
    scores: Scores,
    products: Products,
    /// Whether scores are more than products and a factor.
    is_adjusted: bool,
}

impl Shape {
    fn new(spec: &Spec, of: &Attention, [queries, columns]: [Size; 2], target: &Target) -> Shape {
        Shape {
            heads: spec.dims[..spec.dims.len() - 2].to_vec(),
            queries,
            keys: of.keys,
            width: of.width,
            columns,
            scores: of.scores,
            products: Products::of(of, target),
            is_adjusted: of.mask.is_some() || of.scores.soft_cap.is_some(),
        }
    }

    fn check(&self, bounds: &Env, target: &Target) -> Result<(), SpecError> {
        if !is_near(&self.scores) {
            return Err(SpecError::unsupported(
                "attention over so many positions, or with steps between queries",
            ));
        }
        let lengths = [self.queries, self.keys].map(|size| size.at(bounds));
        if let Some(long) = lengths.iter().find(|n| **n > LONGEST) {
            return Err(SpecError::unsupported(format!(
                "attention over {long} positions"
            )));
        }
        if !is_able(target) {
            return Err(SpecError::unsupported(format!(
                "attention needs waves of 32 lanes and compute capability 8.0, not {} lanes and {}.{}",
                target.wave_width,
                target.sm / 10,
                target.sm % 10
            )));
        }
        Ok(())
    }

    /// The tile of a kernel, by the sizes at the bounds.
    fn tile(&self, pass: Pass, bounds: &Env, target: &Target) -> Result<Tile, SpecError> {
        let width = self.width.at(bounds).max(self.columns.at(bounds));
        let rows = self.rows(pass).at(bounds);
        let heads = points(&self.heads, bounds);
        let tile = pass.tile(
            self.products,
            self.is_adjusted,
            [heads, rows, width],
            target,
        )?;
        match blocks(heads, rows, tile.rows) <= i64::from(i32::MAX) {
            true => Ok(tile),
            false => Err(SpecError::unsupported(format!(
                "attention of {heads} heads"
            ))),
        }
    }

    /// The rows that the blocks of a kernel share among them.
    fn rows(&self, pass: Pass) -> Size {
        match pass {
            Pass::Forward | Pass::Queries => self.queries,
            Pass::KeysAndValues | Pass::Keys | Pass::Values => self.keys,
        }
    }

    /// The words of `AttentionShape` in `kernels.cuh`.
    fn words(&self) -> [Number; 8] {
        let Scores {
            scale,
            causal,
            window,
            past,
            ..
        } = self.scores;
        let behind = window.map_or(8 * LONGEST, i64::from);
        let ahead = if causal { 1 } else { behind };
        let fixed = |n: i64| number(move |_| n);
        [
            sized(self.queries),
            sized(self.keys),
            sized(self.width),
            sized(self.columns),
            fixed(i64::from(past)),
            fixed(behind),
            fixed(ahead),
            fixed(i64::from(scale.to_bits())),
        ]
    }
}

fn blocks(heads: i64, rows: i64, tile: i64) -> i64 {
    heads.saturating_mul((rows + tile - 1) / tile)
}

/// Whether rows of so many elements consist of aligned vectors of 16 bytes.
fn in_vectors(operand: &Operand, width: Size) -> bool {
    let elements = 16 / operand.dtype.bytes() as i64;
    let whole = |size: Size| size.checked_div(elements).is_some();
    let Some((last, others)) = operand.strides.split_last() else {
        return false;
    };
    last.is(1) && whole(operand.offset) && whole(width) && others.iter().all(|&s| whole(s))
}

/// The source of a kernel under construction.
struct Writer<'a> {
    shape: &'a Shape,
    params: Params,
    body: String,
}

impl<'a> Writer<'a> {
    /// Declares the lengths, and the head and the tile of the block.
    fn new(
        shape: &'a Shape,
        of: &Attention,
        pass: Pass,
        tile: &Tile,
        mut params: Params,
    ) -> Writer<'a> {
        let (rows, high) = (shape.rows(pass), tile.rows);
        let tiles = params.block([number(move |env| (rows.at(env) + high - 1) / high)]);
        // In causal attention, the tiles of the last queries and of the first keys take the
        // longest.
        let order = match pass {
            Pass::Forward | Pass::Queries => "tiles - 1 - int(blockIdx.x) % tiles",
            Pass::KeysAndValues | Pass::Keys | Pass::Values => "int(blockIdx.x) % tiles",
        };
        let mut body = format!(
            "const int tiles = int(p.w[{tiles}]), head = int(blockIdx.x) / tiles, tile = {order};\n"
        );
        let heads: Vec<String> = shape
            .heads
            .iter()
            .map(|&d| params.number(&sized(d)))
            .collect();
        body += &Params::split("head", &heads, "h").0;
        let mut writer = Writer {
            shape,
            params,
            body,
        };
        let past = match &of.past {
            Some(past) => {
                let first = 3 + u16::from(of.mask.is_some());
                let place = writer.place(first, past, sized(past.offset));
                format!("*({place})")
            }
            None => "0".into(),
        };
        let (at, step) = (writer.params.block(shape.words()), shape.scores.step);
        writer.body += &format!("const AttentionShape<{step}> shape(p.w + {at}, {past});\n");
        writer.terms(of);
        writer
    }

    /// The address of an operand's element, in this head, from which on its others lie.
    fn place(&mut self, argument: u16, operand: &Operand, first: Number) -> String {
        let mut place = self.params.number(&first);
        let strides = &operand.strides[..self.shape.heads.len()];
        for (axis, &stride) in strides.iter().enumerate() {
            place += &format!(" + h{axis} * {}", self.params.number(&sized(stride)));
        }
        let address = self.params.address(Word::Argument(argument));
        let ty = Storage::of(operand.dtype).ty;
        format!("reinterpret_cast<{ty}*>({address}) + {place}")
    }

    /// Declares the work on products that makes them scores.
    fn terms(&mut self, of: &Attention) {
        let cap = of.scores.soft_cap;
        if !self.shape.is_adjusted {
            self.body += "const ScaledScores terms{};\n";
            return;
        }
        let batch = self.shape.heads.len();
        let (ty, mask) = match &of.mask {
            Some(mask) => {
                let alike = mask.strides[batch].is(0);
                let place = self.place(3, mask, sized(mask.offset));
                let [row, key] = [0, 1].map(|axis| {
                    let stride = mask.strides[batch + axis];
                    self.params.number(&sized(stride))
                });
                let ty = match mask.dtype {
                    DType::Bool => "TruthValue",
                    dtype => Storage::of(dtype).ty,
                };
                let place = format!("reinterpret_cast<const {ty}*>({place})");
                (
                    format!("AttentionMask<{ty}, idx, {alike}>"),
                    format!("{place}, {row}, {key}"),
                )
            }
            None => ("NoMask".into(), String::new()),
        };
        let bits = i64::from(cap.unwrap_or(0.0).to_bits());
        let bits = self.params.block([number(move |_| bits)]);
        self.body += &format!(
            "const AdjustedScores<{}, {ty}> terms{{__uint_as_float(unsigned(p.w[{bits}])), {{{mask}}}}};\n",
            cap.is_some()
        );
    }

    /// Declares the rows of an operand, those of this head.
    fn rows(&mut self, name: &str, argument: u16, operand: &Operand, width: Size) {
        self.some_rows(name, argument, operand, width, (sized(Size::fixed(0)), 1));
    }

    /// Declares the rows of an operand from the first given on, each so many after the one before.
    fn some_rows(
        &mut self,
        name: &str,
        argument: u16,
        operand: &Operand,
        width: Size,
        (first, every): (Number, i64),
    ) {
        let batch = self.shape.heads.len();
        let (offset, apart) = (operand.offset, operand.strides[batch]);
        let first = number(move |env| offset.at(env) + first(env) * apart.at(env));
        let place = self.place(argument, operand, first);
        let row = self
            .params
            .number(&number(move |env| every * apart.at(env)));
        let column = self.params.number(&sized(operand.strides[batch + 1]));
        let (ty, vectors) = (Storage::of(operand.dtype).ty, in_vectors(operand, width));
        self.body += &format!(
            "const AttentionRows<{ty}, idx, {vectors}> {name}{{{place}, {row}, {column}}};\n"
        );
    }

    /// Declares the statistics of this head's queries.
    fn statistics(&mut self) {
        let (heads, queries) = (self.shape.heads.clone(), self.shape.queries);
        let address = self.params.address(Word::Workspace(0));
        let all = self
            .params
            .block([number(move |env| points(&heads, env) * queries.at(env))]);
        self.body += &format!(
            "float* const largest = reinterpret_cast<float*>({address}) + u64(head) * unsigned(shape.queries);\n\
             const AttentionStatistics statistics{{largest, p.w[{all}]}};\n"
        );
    }

    /// The kernel, which takes these declared values.
    fn kernel(mut self, pass: Pass, tile: &Tile, values: &str) -> Kernel {
        let (source, bounds) = tile.source(self.shape.products);
        self.body += &format!(
            "SHARED_BYTES(unsigned char, shared);\n{}<{source}{}>(shape, tile, terms, {values}, shared);\n",
            pass.function(),
            pass.arguments()
        );
        let function =
            self.params
                .function(&tile.name(pass, self.shape.products), bounds, &self.body);
        let (params, tile) = (self.params, *tile);
        let (heads, rows) = (self.shape.heads.clone(), self.shape.rows(pass));
        let dispatch = move |env: &Env| {
            let blocks = blocks(points(&heads, env), rows.at(env), tile.rows);
            Dispatch {
                function: 0,
                // Sizes at the bounds were validated.
                grid: [u32::try_from(blocks).unwrap_or(u32::MAX), 1, 1],
                block: [tile.threads() as u32, 1, 1],
                shared_bytes: tile.shared_bytes(pass) as u32,
                words: params.words(env),
            }
        };
        Kernel {
            function,
            dispatch: Box::new(dispatch),
        }
    }
}

/// A kernel and its launch for the sizes of a run.
struct Kernel {
    function: Function,
    dispatch: Box<dyn Fn(&Env) -> Dispatch + Send + Sync>,
}

/// The argument after queries, keys, values, a mask and a past.
fn first_result(of: &Attention) -> u16 {
    3 + u16::from(of.mask.is_some()) + u16::from(of.past.is_some())
}

/// The kernel of [`Body::Attention`](slabwise_kernels::spec::Body::Attention).
pub fn lower(
    spec: &Spec,
    of: &Attention,
    bounds: &Env,
    target: &Target,
) -> Result<Lowered, SpecError> {
    let [.., queries, columns] = spec.dims[..] else {
        return Err(SpecError::unsupported("attention without rows"));
    };
    let shape = Shape::new(spec, of, [queries, columns], target);
    shape.check(bounds, target)?;
    let pass = Pass::Forward;
    let tile = shape.tile(pass, bounds, target)?;
    let mut writer = Writer::new(&shape, of, pass, &tile, Params::new(spec, bounds, target));
    let result = first_result(of);
    writer.rows("q", 0, &of.q, of.width);
    writer.rows("k", 1, &of.k, of.width);
    writer.rows("v", 2, &of.v, columns);
    writer.rows("y", result, &of.result, columns);
    let kernel = writer.kernel(pass, &tile, "q, k, v, y");
    let launches = move |env: &Env| vec![(kernel.dispatch)(env)];
    Ok(Lowered::new(vec![kernel.function], 0, launches))
}

/// The first row of the gradients of queries (part 0), keys or values, and the rows from one to the
/// next.
fn gradient_rows(grad: &AttentionGrad, part: i64) -> (Number, i64) {
    let (queries, keys) = (grad.queries, grad.of.keys);
    match (grad.in_turns, part) {
        (true, _) => (number(move |_| part), 3),
        (false, 0) => (number(|_| 0), 1),
        (false, _) => (
            number(move |env| queries.at(env) + (part - 1) * keys.at(env)),
            1,
        ),
    }
}

/// The kernels of [`Body::AttentionGrad`](slabwise_kernels::spec::Body::AttentionGrad).
pub fn lower_grad(
    spec: &Spec,
    grad: &AttentionGrad,
    bounds: &Env,
    target: &Target,
) -> Result<Lowered, SpecError> {
    let (of, width) = (&grad.of, grad.of.width);
    let result = first_result(of);
    let shape = Shape::new(spec, of, [grad.queries, width], target);
    shape.check(bounds, target)?;
    let mut functions = Vec::new();
    let mut dispatches = Vec::new();
    for &pass in Pass::of_gradients(width.at(bounds)) {
        let tile = shape.tile(pass, bounds, target)?;
        let mut writer = Writer::new(&shape, of, pass, &tile, Params::new(spec, bounds, target));
        writer.rows("q", 0, &of.q, width);
        writer.rows("k", 1, &of.k, width);
        writer.rows("v", 2, &of.v, width);
        if pass == Pass::Queries {
            writer.rows("y", result, &of.result, width);
        }
        writer.rows("dy", result + 1, &grad.dy, width);
        let (parts, values) = match pass {
            Pass::Queries => (&[("dq", 0)][..], "q, k, v, y, dy, dq, statistics"),
            _ => (
                &[("dk", 1), ("dv", 2)][..],
                "q, k, v, dy, dk, dv, statistics",
            ),
        };
        for &(name, part) in parts {
            let rows = gradient_rows(grad, part);
            writer.some_rows(name, result + 2, &grad.gradients, width, rows);
        }
        writer.statistics();
        let kernel = writer.kernel(pass, &tile, values);
        functions.push(kernel.function);
        dispatches.push(kernel.dispatch);
    }
    let queries = points(&shape.heads, bounds).saturating_mul(grad.queries.at(bounds));
    let workspace = 3 * size_of::<f32>() as u64 * queries.max(0) as u64;
    Ok(Lowered::new(functions, workspace, move |env| {
        let each = dispatches.iter().enumerate();
        each.map(|(function, dispatch)| Dispatch {
            function,
            ..dispatch(env)
        })
        .collect()
    }))
}
